"""Which workers are quarantined, by their own last word to the router. Asked at most twice a second."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from router.stats import RouterStats, WorkerStats

MAX_AGE_S = 0.5


class WorkerHealth:
    """Keeps its last answer while the router is gone."""

    def __init__(self, read_stats: Callable[[], Awaitable[RouterStats | None]]) -> None:
        self._read_stats = read_stats
        self._read_s = -MAX_AGE_S
        self._quarantined: tuple[str, ...] = ()

    async def quarantined(self) -> tuple[str, ...]:
        """Worker ids."""
        now_s = time.monotonic()
        if now_s - self._read_s >= MAX_AGE_S:
            self._read_s = now_s
            stats = await self._read_stats()
            if stats is not None:
                self._quarantined = tuple(worker.worker_id for worker in stats.workers if is_quarantined(worker))
        return self._quarantined

    async def count_quarantined(self) -> int:
        return len(await self.quarantined())


def is_quarantined(worker: WorkerStats) -> bool:
    return worker.snapshot is not None and bool(dict(worker.snapshot.counters).get("quarantined"))
