"""Keeps a router's in-memory index equal to what workers publish in Redis.

Reads the stored entries once, then the stream. Another incarnation or run of Redis, a stream that went back, a position
that does not move on, or a missing batch make it read the stored entries of the workers concerned again. While Redis is
away the index stays as it is: its entries are hints, and workers that return publish all they hold.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cache_service.event_codec import SnapshotStored, WorkerDropped, decode
from cache_service.events import EventBatch, Snapshot
from cache_service.prefix_index import InMemoryPrefixIndex
from cache_service.redis_client import GuardedRedis, RedisLimits, RedisUnavailableError
from cache_service.redis_index import IndexSettings, RedisIndex
from cache_service.redis_replies import IndexStatus
from cluster.api.ids import BlockKey, WorkerId

logger = logging.getLogger(__name__)

BLOCK_MS = 1000
CHECK_PERIOD_S = 1.0
GAP_GRACE_S = 0.2
GAP_BLOCK_MS = 200


@dataclass(slots=True)
class FollowerCounters:
    """Counts since the start."""

    entries: int = 0
    malformed_entries: int = 0
    bootstraps: int = 0
    resyncs: int = 0
    gaps: int = 0
    outages: int = 0


class IndexFollower:
    """`run` it as a task of the loop that owns `index`. `on_gap(worker_id)` may ask the worker for a snapshot directly.

    Without an answer within 0.2 s the stored entries serve.
    """

    def __init__(
        self,
        url: str,
        settings: IndexSettings,
        index: InMemoryPrefixIndex,
        on_gap: Callable[[WorkerId], None] = lambda worker_id: None,
        *,
        limits: RedisLimits | None = None,
    ) -> None:
        self.counters = FollowerCounters()
        self._synced = asyncio.Event()
        self._settings = settings
        self._index = index
        self._on_gap = on_gap
        self._redis = GuardedRedis(url, limits)
        self._stored = RedisIndex(self._redis, settings)
        self._last_id = "0-0"
        self._seen: IndexStatus | None = None
        self._next_check = 0.0
        self._to_read: set[WorkerId] = set()  # said in the stream to have stored a snapshot
        self._gaps: dict[WorkerId, float] = {}  # since when
        self._absent: dict[WorkerId, float] = {}  # since when a worker has no valid lease

    @property
    def is_synced(self) -> bool:
        """False before the first look at Redis and while it is away."""
        return self._synced.is_set()

    async def wait_synced(self) -> None:
        await self._synced.wait()

    @property
    def last_id(self) -> str:
        """The stream entry up to which the index is current."""
        return self._last_id

    async def run(self) -> None:
        """Follows until cancelled. Never raises because of Redis or of what stands in it."""
        failures = 0
        while True:
            try:
                await self._check()
                failures = 0
                self._note_return()
                await self._read()
            except RedisUnavailableError as error:
                failures += 1
                self._next_check = 0.0
                self._note_outage(error)
                await asyncio.sleep(min(2.0, 0.05 * 2 ** min(failures, 8)) * random.uniform(0.5, 1.0))

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def _read(self) -> None:
        block_ms = GAP_BLOCK_MS if self._gaps else BLOCK_MS
        for entry_id, payload in await self._stored.read_stream(self._last_id, block_ms):
            self._last_id = entry_id
            self.counters.entries += 1
            try:
                entry = decode(payload)
            except ValueError as error:
                self.counters.malformed_entries += 1
                logger.warning("prefix index: ignored a stream entry: %s", error)
                continue
            await self._take(entry)
        self._watch_gaps()

    async def _take(self, entry: EventBatch | Snapshot | SnapshotStored | WorkerDropped) -> None:
        match entry:
            case EventBatch():
                self._index.apply(entry)
            case Snapshot():
                self._index.expect_epoch(entry.worker_id, entry.epoch)
                self._index.apply_snapshot(entry)
            case SnapshotStored():
                self._to_read.add(entry.worker_id)
                self._next_check = 0.0
            case WorkerDropped():
                position = self._index.position(entry.worker_id)
                if position is not None and entry.epoch in (position[0], "any"):
                    self._index.drop_worker(entry.worker_id)

    def _watch_gaps(self) -> None:
        missing = self._index.needs_snapshot
        self._gaps = {name: since for name, since in self._gaps.items() if name in missing}
        for worker_id in missing - self._gaps.keys():
            self.counters.gaps += 1
            self._gaps[worker_id] = time.monotonic()
            self._on_gap(worker_id)
        if any(time.monotonic() - since > GAP_GRACE_S for since in self._gaps.values()):
            self._next_check = 0.0

    async def _check(self) -> None:
        """Once a second, or at once when there is a reason: is this still the same story, and are we in it?"""
        if time.monotonic() < self._next_check:
            return
        status = await self._stored.status()
        before, self._seen = self._seen, status
        if before is None or self._is_another_story(before, status):
            self.counters.bootstraps += 1
            self._last_id = status.last_id
            before = status
        await self._read_stored(status, self._behind(before, status))
        self._to_read.clear()
        self._drop_absent(status)
        self._next_check = time.monotonic() + CHECK_PERIOD_S

    def _is_another_story(self, before: IndexStatus, now: IndexStatus) -> bool:
        is_same_server = (before.incarnation, before.run_id) == (now.incarnation, now.run_id)
        return not is_same_server or _order(now.last_id) < _order(self._last_id)

    def _behind(self, before: IndexStatus, now: IndexStatus) -> list[WorkerId]:
        """Workers whose position of the check before has not been reached by now, or of which a batch is missing."""
        behind = []
        for worker_id, record in now.alive().items():
            position = self._index.position(worker_id)
            old = before.workers.get(worker_id)
            reached = old.sequence if old is not None and old.epoch == record.epoch else 0
            is_asked_for = worker_id in self._gaps or worker_id in self._to_read
            if is_asked_for or position is None or position[0] != record.epoch or position[1] < reached:
                behind.append(worker_id)
        return behind

    async def _read_stored(self, status: IndexStatus, worker_ids: Iterable[WorkerId]) -> None:
        wanted = {status.workers[worker_id].slot: worker_id for worker_id in worker_ids}
        if not wanted:
            return
        self.counters.resyncs += len(wanted)
        held = await self._stored.dump(frozenset(wanted))
        for slot, worker_id in wanted.items():
            record = status.workers[worker_id]
            self._index.expect_epoch(worker_id, record.epoch)
            keys = tuple(BlockKey(key) for key in held[slot])
            self._index.apply_snapshot(Snapshot(worker_id, record.epoch, record.sequence, keys))
            await asyncio.sleep(0)

    def _drop_absent(self, status: IndexStatus) -> None:
        """A lease that has been over for as long as it is: the worker is dead, or will publish everything again."""
        now = time.monotonic()
        absent = self._index.workers - status.alive().keys()
        self._absent = {worker_id: self._absent.get(worker_id, now) for worker_id in absent}
        for worker_id, since in self._absent.items():
            if now - since > self._settings.lease_s:
                self._index.drop_worker(worker_id)

    def _note_outage(self, error: RedisUnavailableError) -> None:
        if self.is_synced or not self.counters.outages:
            self.counters.outages += 1
            logger.warning("prefix index: cannot follow (%s); routing goes on with what is known", error)
        self._synced.clear()

    def _note_return(self) -> None:
        if not self.is_synced and self.counters.outages:
            logger.info("prefix index: following again")
        self._synced.set()


def _order(stream_id: str) -> tuple[int, int]:
    milliseconds, _, number = stream_id.partition("-")
    return int(milliseconds), int(number or 0)
