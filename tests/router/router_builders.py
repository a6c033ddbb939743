"""Builders with defaults, and a clock to turn by hand, for the router's tests."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import Any

from cache_service.events import BlockStored, EventBatch
from cache_service.prefix_index import InMemoryPrefixIndex
from cluster.api.ids import BlockKey, RequestId, WorkerId
from cluster.api.routing import RouteQuery
from cluster.api.worker_state import WorkerInfo, WorkerSnapshot
from router.config import RouterConfig
from router.policy import Candidate
from router.router import Router


class ManualClock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def store(index: InMemoryPrefixIndex, worker_id: str, stored: Sequence[BlockKey], epoch: str = "e1") -> None:
    """As if the worker had announced `stored`."""
    position = index.position(WorkerId(worker_id))
    sequence = position[1] + 1 if position and position[0] == epoch else 1
    index.apply(EventBatch(WorkerId(worker_id), epoch, sequence, (BlockStored(tuple(stored)),)))


def keys(prefix: str, count: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(blake2b(f"{prefix}/{index}".encode(), digest_size=32).digest()) for index in range(count))


def worker_info(worker_id: str = "w0", epoch: str = "e1", **changes: Any) -> WorkerInfo:
    values: dict[str, Any] = {
        "worker_id": WorkerId(worker_id),
        "epoch": epoch,
        "replica_id": f"replica-{worker_id}-{epoch}",
        "model": "m",
        "numerics": "n",
        "block_size_tokens": 16,
        "num_blocks": 1000,
        "max_num_seqs": 8,
        "max_model_len": 100_000,
    }
    return WorkerInfo(**(values | changes))


def snapshot(worker_id: str = "w0", epoch: str = "e1", **changes: Any) -> WorkerSnapshot:
    values: dict[str, Any] = {
        "worker_id": WorkerId(worker_id),
        "epoch": epoch,
        "num_running": 0,
        "num_waiting": 0,
        "pending_prefill_tokens": 0,
        "num_free_blocks": 1000,
        "prefill_tokens_per_s": 1000.0,
        "decode_step_s": 0.01,
        "request_ids": (),
    }
    return WorkerSnapshot(**(values | changes))


def query(request_id: str = "r0", num_prompt_tokens: int = 160, **changes: Any) -> RouteQuery:
    values: dict[str, Any] = {
        "request_id": RequestId(request_id),
        "model": "m",
        "block_keys": keys(f"own-{request_id}", num_prompt_tokens // 16),
        "num_prompt_tokens": num_prompt_tokens,
        "max_tokens": 64,
        "tenant_hash": b"tenant",
        "user_hash": b"user",
    }
    return RouteQuery(**(values | changes))


def candidate(worker_id: str, **changes: Any) -> Candidate:
    values: dict[str, Any] = {"max_num_seqs": 8, "num_blocks": 1000, "prefill_tokens_per_s": 1000.0}
    return Candidate(worker_id=WorkerId(worker_id), **(values | changes))


def make_router(
    num_workers: int = 2, config: RouterConfig | None = None, **worker_changes: Any
) -> tuple[Router, ManualClock, InMemoryPrefixIndex]:
    clock = ManualClock()
    index = InMemoryPrefixIndex(clock=clock)
    router = Router(index, config, clock=clock, unix_clock=clock, random=Random(7))
    for number in range(num_workers):
        router.register(worker_info(f"w{number}", **worker_changes))
    return router, clock, index
