"""How one engine is set up. Decided at start, then frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from cluster.api.scope import Scope


class Batching(Enum):
    CONTINUOUS = "continuous"  # sequences join and leave at every step
    STATIC = "static"  # a batch is filled once and runs until its last sequence ends


class Layout(Enum):
    PACKED = "packed"  # rows of different lengths lie end to end
    PADDED = "padded"  # rows are padded to the longest


class IsolationCheck(Enum):
    OFF = "off"
    CHECK = "check"  # block tables against owners, scopes and writes before each step
    POISON = "poison"  # as CHECK, and stale memory is overwritten so that reading it shows


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes are in tokens or blocks, as named. `num_blocks` and `max_model_len` may not exceed the runner's."""

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512  # token budget of one step
    max_shared_chunk_tokens: int = 128  # cap on one prefill chunk while any other request is alive
    max_shared_prefill_tokens: int = 128  # the same for all chunks of one step together
    max_queue_len: int = 4096
    batching: Batching = Batching.CONTINUOUS
    layout: Layout = Layout.PACKED
    prefix_caching: bool = True
    isolation_check: IsolationCheck = IsolationCheck.CHECK
    poison_value: float = math.nan  # NaN can hide a finite leak: run once with NaN, once with a large finite value
    check_conservation: bool = False  # recount every block after each step; for tests and debugging
    checksum_blocks: float = 0.0  # share of published blocks that get a checksum, verified on each hit of them
    event_log_size: int = 65_536
    max_pinned_fraction: float = 0.25  # of the pool, for warmed templates
    max_pinned_fraction_per_tenant: float = 0.25
    user_idle_timeout_s: float | None = None  # USER blocks unused for so long are dropped; None: never
    session_idle_timeout_s: float | None = None  # the same for SESSION blocks

    def __post_init__(self) -> None:
        _require_at_least("num_blocks", self.num_blocks, 1)
        _require_at_least("max_model_len", self.max_model_len, 2)
        _require_at_least("block_size", self.block_size, 1)
        _require_at_least("max_num_seqs", self.max_num_seqs, 1)
        _require_at_least("max_shared_chunk_tokens", self.max_shared_chunk_tokens, 1)
        _require_at_least("max_shared_prefill_tokens", self.max_shared_prefill_tokens, 1)
        _require_at_least("max_queue_len", self.max_queue_len, 1)
        _require_at_least("event_log_size", self.event_log_size, 1)
        # Below one token per sequence some running sequence could starve in every step.
        _require_at_least("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        if not 0.0 <= self.checksum_blocks <= 1.0:
            raise ValueError(f"checksum_blocks is {self.checksum_blocks}, must be from 0 to 1")
        for name in ("max_pinned_fraction", "max_pinned_fraction_per_tenant"):
            value = getattr(self, name)
            if not 0.0 <= value <= 0.9:
                raise ValueError(f"{name} is {value}, must be from 0 to 0.9")
        for name in ("user_idle_timeout_s", "session_idle_timeout_s"):
            timeout_s = getattr(self, name)
            if timeout_s is not None and not timeout_s > 0:
                raise ValueError(f"{name} is {timeout_s}, must be above 0 or None")

    @property
    def idle_timeouts_s(self) -> dict[Scope, float]:
        """Of the scopes whose unused blocks are dropped."""
        timeouts_s = {Scope.USER: self.user_idle_timeout_s, Scope.SESSION: self.session_idle_timeout_s}
        return {scope: timeout_s for scope, timeout_s in timeouts_s.items() if timeout_s is not None}

    @property
    def max_pinned_blocks(self) -> int:
        return int(self.num_blocks * self.max_pinned_fraction)

    @property
    def max_pinned_blocks_per_tenant(self) -> int:
        return int(self.num_blocks * self.max_pinned_fraction_per_tenant)


def _require_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} is {value}, must be at least {minimum}")
