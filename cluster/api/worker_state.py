"""What a worker tells the router about itself: identity at start, a snapshot every half second."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.ids import RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Fixed for one life (epoch) of a worker. Equal `numerics` mean: each continues the other's streams bit for bit."""

    worker_id: WorkerId
    epoch: str
    replica_id: str  # how the transport addresses it
    model: str
    numerics: str  # digest of ISA, torch, threads, dtype, kernel and self-test
    block_size_tokens: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    # What a gateway needs to derive the same block keys as this worker, and to validate requests
    source_model: str = ""  # the weights' own name, which stands in block keys; `model` may be another one
    weights_digest: bytes = b""
    dtype: str = ""
    kv_layout: str = ""
    vocab_size: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    adapters: tuple[tuple[str, bytes], ...] = ()  # name, content digest; the one thing that changes within an epoch
    is_warm: bool = True  # False: takes no work until its heartbeat says that its templates are in place


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """Load at one moment; heals the router's own counters. Counts are of this epoch."""

    worker_id: WorkerId
    epoch: str
    num_running: int
    num_waiting: int
    pending_prefill_tokens: int
    num_free_blocks: int  # free or evictable
    prefill_tokens_per_s: float  # measured, exponentially smoothed; 0 while unknown
    decode_step_s: float  # measured; 0 while unknown
    request_ids: tuple[RequestId, ...]  # alive in the engine
    is_draining: bool = False
    is_healthy: bool = True
    counters: tuple[tuple[str, int], ...] = ()  # since the start of this epoch, by name
    max_num_seqs: int = 0  # sequences that run together now; 0: as registered
