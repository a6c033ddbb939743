"""Several engines as one target: the requests of a round are spread over them, and they may be replaced in between."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.experiment.event_file import BlockEvent
from cluster.experiment.observation import RoundObservation
from cluster.experiment.plan import PlannedRequest, Round
from cluster.experiment.targets.embedded import EmbeddedTarget
from cluster.experiment.targets.target import ReuseControl, TargetInfo


class WorkerGroup:
    """Implements Target. Pairs of marked requests stay together, since only neighbours can share a step."""

    def __init__(self, workers: Sequence[EmbeddedTarget], restart_every: int | None = None) -> None:
        self.workers = tuple(workers)
        self._restart_every = restart_every
        self._num_rounds = 0

    @property
    def info(self) -> TargetInfo:
        info = self.workers[0].info
        return replace(info, settings={**info.settings, "workers": str(len(self.workers))})

    @property
    def events(self) -> Sequence[BlockEvent]:
        """Of the first worker: one engine's blocks are one picture."""
        return self.workers[0].events

    async def run_round(self, planned: Round) -> RoundObservation:
        if self._restart_every and self._num_rounds and self._num_rounds % self._restart_every == 0:
            self._restart()
        self._num_rounds += 1
        shares = await self._shares(planned)
        parts = await asyncio.gather(
            *(worker.run_round(share) for worker, share in zip(self.workers, shares, strict=True))
        )
        return _merge(planned.index, parts)

    async def reuse_control(self) -> ReuseControl:
        return await self.workers[0].reuse_control()

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))

    def _restart(self) -> None:
        for worker in self.workers:
            worker.restart()

    async def _shares(self, planned: Round) -> list[Round]:
        shares: list[list[PlannedRequest]] = [[] for _ in self.workers]
        for request in planned.requests:
            shares[await self._place(request, planned)].append(request)
        return [Round(planned.index, tuple(share)) for share in shares]

    async def _place(self, request: PlannedRequest, planned: Round) -> int:
        """The number of the worker that gets the request."""
        kin = [one for one in planned.requests if one.is_marked == request.is_marked]
        number = kin.index(request)
        return (number // 2 if request.is_marked else number) % len(self.workers)


def _merge(index: int, parts: Sequence[RoundObservation]) -> RoundObservation:
    counters: dict[str, int] = {}
    for part in parts:
        counters = _add(counters, part.counters)
    return RoundObservation(
        index,
        {name: seen for part in parts for name, seen in part.by_name.items()},
        shared_step=all(part.shared_step for part in parts),
        num_evictions=sum(part.num_evictions or 0 for part in parts),
        num_preemptions=sum(part.num_preemptions or 0 for part in parts),
        violations=tuple(violation for part in parts for violation in part.violations),
        reuses=tuple(reuse for part in parts for reuse in part.reuses),
        counters=counters,
    )


def _add(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {*first, *second}}
