"""What a worker announces about its prefix cache. Keys only: no token ids, text or identities."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.ids import BlockKey, WorkerId


@dataclass(frozen=True, slots=True)
class BlockStored:
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one life of a worker, in order. `sequence` counts from 1; a gap asks for a snapshot."""

    worker_id: WorkerId
    epoch: str
    sequence: int
    events: tuple[BlockEvent, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys that the worker holds after batch `sequence`. Replaces whatever was believed of it."""

    worker_id: WorkerId
    epoch: str
    sequence: int
    keys: tuple[BlockKey, ...]
