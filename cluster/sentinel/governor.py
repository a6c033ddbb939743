"""The batch governor: how many sequences may share a step on a worker, found out by marker probes of that size."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.api.channel import SetMaxNumSeqs
from cluster.api.worker_state import WorkerInfo
from cluster.control_client import WorkerControlClient
from cluster.sentinel.probe import MarkerProbe, ProbeReport, Result

MAX_VOID_TRIALS = 3


class Step(Enum):
    WIDENED = "widened"
    FELL_BACK = "fell back"
    TRY_AGAIN = "try again"
    SETTLED = "settled"


@dataclass(slots=True)
class _Size:
    """Of one life of one worker: the largest batch that stayed clean, and whether to try a larger one."""

    clean: int
    is_settled: bool = False
    num_void: int = 0


class BatchGovernor:
    """Doubles a worker's batch while probes of the new size are clean; at a leak it goes back and stays there."""

    def __init__(self, probe: MarkerProbe, control: WorkerControlClient, first: int, limit: int) -> None:
        self._probe = probe
        self._control = control
        self._first = min(first, limit)
        self._limit = limit
        self._sizes: dict[str, _Size] = {}  # by epoch

    def size_of(self, worker: WorkerInfo) -> int:
        """The largest batch known to be clean."""
        size = self._sizes.get(worker.epoch)
        return self._first if size is None else size.clean

    def is_settled(self, worker: WorkerInfo) -> bool:
        size = self._sizes.get(worker.epoch)
        return size is not None and size.is_settled

    async def advance(self, worker: WorkerInfo) -> tuple[Step, ProbeReport | None]:
        """One trial at double the size. Requests of users may share its steps: a leak then is one of this trial too.

        Raises UnavailableError when the worker cannot be told its size.
        """
        size = self._sizes.setdefault(worker.epoch, _Size(self._first))
        wanted = min(2 * size.clean, self._limit)
        if size.is_settled or wanted == size.clean:
            size.is_settled = True
            return Step.SETTLED, None
        await self._control.call(worker, SetMaxNumSeqs(wanted))
        report = await self._probe.run(worker, wanted)
        if report.result is Result.CLEAN:
            size.clean, size.num_void = wanted, 0
            return Step.WIDENED, report
        await self._control.call(worker, SetMaxNumSeqs(size.clean))
        if report.result is Result.LEAK:
            size.is_settled = True
            return Step.FELL_BACK, report
        size.num_void += 1
        size.is_settled = size.num_void >= MAX_VOID_TRIALS
        return Step.TRY_AGAIN, report

    def forget_all_but(self, epochs: set[str]) -> None:
        self._sizes = {epoch: size for epoch, size in self._sizes.items() if epoch in epochs}
