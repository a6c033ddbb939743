"""Several engines behind the real prefix index: each request goes where the index says its prefix is.

What the index says is a hint. The engine verifies every hit, so a wrong hint costs reuse and nothing else; how often it
was wrong is counted here, since that is the only trace that a broken index leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cache_service.events import EventBatch, Snapshot
from cache_service.prefix_index import InMemoryPrefixIndex
from cluster.api.ids import WorkerId, new_epoch
from cluster.experiment.observation import RoundObservation
from cluster.experiment.plan import PlannedRequest, Round
from cluster.experiment.targets.embedded import EmbeddedTarget
from cluster.experiment.targets.worker_group import WorkerGroup

STALE_HITS = "index_stale_hits"  # blocks that the index promised and the worker did not have


class IndexedGroup(WorkerGroup):
    """Implements Target. Block events reach the index between two rounds; a restart announces a new epoch."""

    def __init__(
        self,
        workers: Sequence[EmbeddedTarget],
        restart_every: int | None = None,
        make_index: Callable[[], InMemoryPrefixIndex] = InMemoryPrefixIndex,
    ) -> None:
        super().__init__(workers, restart_every)
        self._index = make_index()
        self._ids = [WorkerId(f"worker-{number}") for number in range(len(workers))]
        self._epochs = [new_epoch() for _ in workers]
        self._sequences = [0] * len(workers)
        self._hints: dict[str, int] = {}  # blocks promised for a request at the worker it was sent to
        self._next = 0

    async def run_round(self, planned: Round) -> RoundObservation:
        self._hints.clear()
        seen = await super().run_round(planned)
        self._publish_events()
        # After an eviction a promise may be broken without any fault.
        stale = 0 if seen.num_evictions else sum(self._num_stale(name, seen) for name in self._hints)
        return replace(seen, counters={**seen.counters, STALE_HITS: stale})

    def _restart(self) -> None:
        super()._restart()
        for number, worker_id in enumerate(self._ids):
            self._epochs[number] = new_epoch()
            self._sequences[number] = 0
            self._index.apply_snapshot(Snapshot(worker_id, self._epochs[number], 0, ()))

    async def _place(self, request: PlannedRequest, planned: Round) -> int:
        keys, num_usable = await self.workers[0].prompt_keys(request)
        matched = self._index.match(keys)
        best = max(matched.values(), default=0)
        holders = [number for number, worker_id in enumerate(self._ids) if best and matched.get(worker_id) == best]
        number = holders[0] if holders else self._next
        self._next = (self._next + 1) % len(self.workers)
        self._hints[request.name] = min(best, num_usable)
        return number

    def _num_stale(self, name: str, seen: RoundObservation) -> int:
        observation = seen.by_name.get(name)
        if observation is None or observation.num_cached_tokens is None or observation.error is not None:
            return 0
        num_cached = observation.num_cached_tokens // self.workers[0].config.block_size
        return max(0, self._hints[name] - num_cached)

    def _publish_events(self) -> None:
        for number, worker in enumerate(self.workers):
            events = tuple(worker.stack.engine.drain_events())
            if events:
                self._sequences[number] += 1
                batch = EventBatch(self._ids[number], self._epochs[number], self._sequences[number], events)
                self._index.apply(batch)
