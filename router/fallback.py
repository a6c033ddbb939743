"""Placement without the router: what a gateway does while the router is gone.

Consistent hashing with bounded load: a user's requests go to the same worker, where their prefixes are, as long as that
worker has no more than its share of this gateway's requests. Every gateway comes to the same choice without talking.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from cluster.api.errors import UnavailableError
from cluster.api.ids import RequestId, WorkerId
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.worker_state import WorkerInfo


@dataclass(frozen=True)
class FallbackConfig:
    load_factor: float = 1.25  # a worker takes at most this times the mean number of this gateway's requests
    points_per_worker: int = 64
    cooldown_s: float = 5.0  # how long a worker that could not be reached is left alone

    def __post_init__(self) -> None:
        if not 1.0 < self.load_factor <= 100.0:
            raise ValueError(f"load_factor is {self.load_factor}, allowed are values above 1 up to 100")
        if not 1 <= self.points_per_worker <= 10_000:
            raise ValueError(f"points_per_worker is {self.points_per_worker}, allowed are 1 to 10000")
        if not 0 <= self.cooldown_s <= 3600:
            raise ValueError(f"cooldown_s is {self.cooldown_s}, allowed are 0 to 3600")


class FallbackRouter:
    """Knows only the workers it was told of and this gateway's own requests."""

    def __init__(self, config: FallbackConfig | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config or FallbackConfig()
        self._clock = clock
        self._avoid_until_s: dict[tuple[WorkerId, str], float] = {}  # by worker and epoch
        self._workers: dict[WorkerId, WorkerInfo] = {}
        self._ring: list[tuple[int, WorkerId]] = []
        self._placed: dict[RequestId, WorkerId] = {}
        self._num_running: Counter[WorkerId] = Counter()

    def update(self, workers: Iterable[WorkerInfo]) -> None:
        """The workers as last known; a worker's points on the ring depend on its id alone."""
        known = {info.worker_id: info for info in workers}
        has_same_ring = known.keys() == self._workers.keys()
        self._workers = known
        if has_same_ring:
            return
        self._ring = sorted(
            (_point(f"{worker_id}/{number}".encode()), worker_id)
            for worker_id in self._workers
            for number in range(self._config.points_per_worker)
        )

    def route(self, query: RouteQuery) -> RouteDecision:
        """Chooses and counts; call `release` in a `finally`. Raises UnavailableError when no worker fits."""
        self.release(query.request_id)
        self._forget_cooled_down()
        usable = {worker_id for worker_id, info in self._workers.items() if self._can_serve(info, query)}
        if not usable:
            raise UnavailableError("no worker can serve this request", retry_after_s=1.0)
        total = sum(self._num_running[worker_id] for worker_id in usable) + 1
        limit = math.ceil(self._config.load_factor * total / len(usable))
        # Some worker is always below: the limit exceeds the mean.
        chosen = next(w for w in self._clockwise(query) if w in usable and self._num_running[w] < limit)
        self._placed[query.request_id] = chosen
        self._num_running[chosen] += 1
        info = self._workers[chosen]
        return RouteDecision(chosen, info.epoch, info.replica_id, info.numerics, num_matched_blocks=0)

    def release(self, request_id: RequestId) -> None:
        worker_id = self._placed.pop(request_id, None)
        if worker_id is None:
            return
        self._num_running[worker_id] -= 1
        if not self._num_running[worker_id]:
            del self._num_running[worker_id]

    def worker_failed(self, worker_id: WorkerId, epoch: str) -> None:
        """Leaves that life of the worker alone for a while; another life is not concerned."""
        self._avoid_until_s[worker_id, epoch] = self._clock() + self._config.cooldown_s

    def num_running(self, worker_id: WorkerId) -> int:
        return self._num_running[worker_id]

    def _clockwise(self, query: RouteQuery) -> Iterator[WorkerId]:
        """Workers in the order of the ring, from the caller's point on; repeats are harmless."""
        key = query.affinity_key.encode() if query.affinity_key is not None else b""
        start = bisect_right(self._ring, (_point(query.tenant_hash + query.user_hash + key), ""))
        for offset in range(len(self._ring)):
            yield self._ring[(start + offset) % len(self._ring)][1]

    def _forget_cooled_down(self) -> None:
        now_s = self._clock()
        self._avoid_until_s = {life: until_s for life, until_s in self._avoid_until_s.items() if until_s > now_s}

    def _can_serve(self, info: WorkerInfo, query: RouteQuery) -> bool:
        return (
            (info.worker_id, info.epoch) not in self._avoid_until_s
            and info.model == query.model
            and info.worker_id not in query.excluded
            and (query.numerics is None or info.numerics == query.numerics)
            and query.num_prompt_tokens <= info.max_model_len
        )


def _point(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
