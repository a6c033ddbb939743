"""Counters and gauges of the router. No prompt, no raw identity: worker ids and numbers only."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.api.ids import WorkerId
from cluster.api.worker_state import WorkerSnapshot


@dataclass(slots=True)
class Counters:
    """Only ever grow."""

    num_decisions: int = 0
    num_retries: int = 0
    num_rate_limited: int = 0
    num_overloaded: int = 0
    num_expired: int = 0
    num_unavailable: int = 0
    num_aborted_waiting: int = 0
    num_healed: int = 0  # leaked places that a snapshot gave back
    num_lost_with_worker: int = 0  # places that ended with their worker's life
    num_prompt_blocks: int = 0
    num_matched_blocks: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStats:
    worker_id: WorkerId
    epoch: str
    is_live: bool
    is_draining: bool
    is_circuit_open: bool
    num_running: int
    num_prefilling: int
    pending_prefill_tokens: float
    prefill_tokens_per_s: float
    last_seen_age_s: float
    snapshot: WorkerSnapshot | None = None  # the worker's own last word
    is_heard: bool = True  # False: it has fallen silent, and its last word describes the past


@dataclass(frozen=True, slots=True)
class RouterStats:
    counters: Counters
    num_queued: int
    num_reservations: int
    workers: tuple[WorkerStats, ...] = field(default=())
