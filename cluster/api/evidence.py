"""What a worker shows of itself to operators and to the checks that look at a live cluster. No token, no text."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.ids import RequestId


@dataclass(frozen=True, slots=True)
class TracedEvent:
    """One event of one block in one of its lives. `user` is a short form of a keyed hash, never a name."""

    step: int
    time_s: float
    action: str  # allocate, write, reuse, release, evict, publish
    block: int
    generation: int
    request: RequestId | None
    scope: str | None  # of a published block
    user: str | None


@dataclass(frozen=True, slots=True)
class WorkerEvidence:
    """Counted on the step thread between two steps. `broken_law` says how the block pool fails its conservation."""

    settings: tuple[tuple[str, str], ...]
    counters: tuple[tuple[str, int], ...]
    num_blocks: int
    num_free: int
    num_cached: int
    num_in_use: int
    num_published: int
    broken_law: str | None
    key_digest: bytes  # what the worker's key derivation makes of a fixed chain of blocks
    quarantine_reason: str | None


@dataclass(frozen=True, slots=True)
class LayoutEvidence:
    """Differences between rows computed alone and in company; empty where every bit was equal."""

    num_comparisons: int
    position_faults: tuple[str, ...]
    mask_faults: tuple[str, ...]
    not_done: str | None = None  # why nothing could be compared
