"""The sentinel: a probe through every worker, at once when it appears and then once a period; a leak quarantines it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from cluster.api.channel import Quarantine
from cluster.api.errors import WatchwordError
from cluster.api.worker_state import WorkerInfo
from cluster.control_client import WorkerControlClient
from cluster.sentinel.governor import BatchGovernor, Step
from cluster.sentinel.metrics import SentinelMetrics
from cluster.sentinel.probe import MarkerProbe, ProbeReport, Result

logger = logging.getLogger("watchword.sentinel")

LOOK_PERIOD_S = 0.5


class Sentinel:
    """`workers` gives those that take work; a quarantined one is no longer among them."""

    def __init__(
        self,
        probe: MarkerProbe,
        control: WorkerControlClient,
        metrics: SentinelMetrics,
        workers: Callable[[], Sequence[WorkerInfo]],
        period_s: float,
        governor: BatchGovernor | None = None,
    ) -> None:
        if period_s <= 0:
            raise ValueError(f"period_s is {period_s}, must be above 0")
        self.period_s = period_s
        self._probe = probe
        self._control = control
        self._metrics = metrics
        self._workers = workers
        self._governor = governor
        self._due_s: dict[str, float] = {}  # by epoch

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("the sentinel failed; it goes on")
            await asyncio.sleep(LOOK_PERIOD_S)

    async def look(self) -> None:
        """Probes every worker that is due, one after the other."""
        workers = self._workers()
        epochs = {worker.epoch for worker in workers}
        self._due_s = {epoch: due_s for epoch, due_s in self._due_s.items() if epoch in epochs}
        if self._governor is not None:
            self._governor.forget_all_but(epochs)
        for worker in workers:
            if self._due_s.get(worker.epoch, 0.0) <= time.monotonic():
                await self.probe(worker)

    async def probe(self, worker: WorkerInfo) -> ProbeReport:
        """One probe now, counted and acted upon."""
        started_s = time.monotonic()
        report, is_urgent = await self._run(worker)
        now_s = time.monotonic()
        self._due_s[worker.epoch] = now_s if is_urgent else now_s + self.period_s
        self._metrics.note(report, now_s - started_s, time.time())
        if report.result is Result.LEAK:
            await self._quarantine(worker, report)
        elif report.result is not Result.CLEAN:
            logger.warning("probe of %s: %s, %s", worker.worker_id, report.result.value, report.detail)
        return report

    async def _run(self, worker: WorkerInfo) -> tuple[ProbeReport, bool]:
        """The report, and whether the next probe should follow at once: while a batch size is being found."""
        if self._governor is None or self._governor.is_settled(worker):
            return await self._probe.run(worker), False
        try:
            step, report = await self._governor.advance(worker)
        except WatchwordError as error:
            return ProbeReport(Result.FAILED, error.message), False
        logger.info("batch of %s: %s, now %d", worker.worker_id, step.value, self._governor.size_of(worker))
        return report or await self._probe.run(worker), step is Step.WIDENED

    async def _quarantine(self, worker: WorkerInfo, report: ProbeReport) -> None:
        logger.error("LEAK on %s (epoch %s): %s", worker.worker_id, worker.epoch, report.detail)
        try:
            await self._control.call(worker, Quarantine(f"sentinel: {report.detail}"))
        except WatchwordError as error:
            self._due_s[worker.epoch] = 0.0  # again at once: it must not go on unnoticed
            logger.error("%s could not be quarantined: %s", worker.worker_id, error.message)
