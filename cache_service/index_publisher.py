"""What a worker uses to tell the index in Redis what it holds. Never blocks, slows or fails the worker.

`publish` only appends to a queue. A task of the publisher's event loop keeps a copy of what the worker holds and brings
Redis to it: batch by batch while all is well, with a whole new slot after an outage, a lost life or a cleared cache.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from cache_service.event_codec import SnapshotStored, check_names
from cache_service.events import AllBlocksCleared, EventBatch, Snapshot
from cache_service.prefix_index import InMemoryPrefixIndex
from cache_service.redis_client import GuardedRedis, RedisLimits, RedisUnavailableError
from cache_service.redis_index import FencedError, IndexSettings, LifeLostError, RedisIndex, now_ms
from cache_service.sweeper import Sweeper
from cluster.api.ids import BlockKey, WorkerId

logger = logging.getLogger(__name__)

MAX_QUEUED_BATCHES = 10_000
MAX_UNSENT_BLOCKS = 4096  # beyond that a new slot is cheaper for everyone, and the stream stays small
MAX_BATCHES_PER_CALL = 64
INLINE_SNAPSHOT_BLOCKS = 1024
GATHER_S = 0.2  # steps come faster than a router needs to hear of them: what it has placed itself it knows already
MAX_RENEWAL_S = 1.0  # also how soon a worker without traffic notices that Redis lost its data


class IndexPublisher:
    """One life (`epoch`) of one worker. `run` it as a task; `publish` and `publish_snapshot` from any thread.

    `request_snapshot` is called when a batch of the worker itself is missing; it must not block. The worker answers
    with `publish_snapshot`. All else heals from the publisher's own copy. Batches of `gather_s` seconds go in one call.
    """

    def __init__(
        self,
        url: str,
        settings: IndexSettings,
        worker_id: WorkerId,
        epoch: str,
        *,
        request_snapshot: Callable[[], None] = lambda: None,
        limits: RedisLimits | None = None,
        gather_s: float = GATHER_S,
    ) -> None:
        check_names(worker_id, epoch)
        self.worker_id = worker_id
        self.epoch = epoch
        self.is_synced = False  # Redis holds all that was taken from the queue
        self.is_fenced = False  # a younger life of the worker publishes; tried again after each lease
        self.num_outages = 0
        self._settings = settings
        self._request_snapshot = request_snapshot
        self._gather_s = gather_s
        self._redis = GuardedRedis(url, limits)
        self._index = RedisIndex(self._redis, settings)
        self._started_ms = now_ms()
        self._held = InMemoryPrefixIndex()
        self._held.apply_snapshot(Snapshot(worker_id, epoch, 0, ()))
        self._queue: deque[EventBatch | Snapshot] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._unsent: list[EventBatch] = []
        self._num_unsent_blocks = 0
        self._slot: int | None = None  # None: Redis must be given everything
        self._sent_sequence = 0
        self._is_down = False

    @property
    def num_unsent(self) -> int:
        """Batches and snapshots that Redis has not seen yet, as far as they will be sent one by one."""
        return len(self._queue) + len(self._unsent)

    def publish(self, batch: EventBatch) -> None:
        """Thread-safe. Batches in order of sequence. Raises ValueError for another worker or epoch."""
        self._enqueue(batch)

    def publish_snapshot(self, snapshot: Snapshot) -> None:
        """Thread-safe, in order with `publish`. Raises ValueError for another worker or epoch."""
        self._enqueue(snapshot)

    async def run(self) -> None:
        """Publishes until cancelled. Never raises because of Redis."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish_forever())
            group.create_task(Sweeper(self._index).run())

    async def aclose(self) -> None:
        """After `run` was cancelled: takes the worker off the list, if Redis answers."""
        try:
            if self._slot is not None:
                await self._index.bury(self.worker_id, self.epoch)
        except RedisUnavailableError as error:
            logger.info("prefix index: no farewell from %s: %s", self.worker_id, error)
        await self._redis.aclose()

    def _enqueue(self, item: EventBatch | Snapshot) -> None:
        if (item.worker_id, item.epoch) != (self.worker_id, self.epoch):
            raise ValueError(f"publisher of {self.worker_id} {self.epoch} was given {item.worker_id} {item.epoch}")
        with self._lock:
            if len(self._queue) >= MAX_QUEUED_BATCHES:
                self._queue.clear()  # the gap in the sequence is noticed and asks for a snapshot
            self._queue.append(item)
            is_first = len(self._queue) == 1
        if is_first and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the worker is ending
                self._loop.call_soon_threadsafe(self._wake.set)

    async def _publish_forever(self) -> None:
        failures = 0
        while True:
            try:
                await self._bring_up_to_date()
                failures = 0
                await asyncio.sleep(self._gather_s)
                await self._wait(min(self._settings.lease_s / 3, MAX_RENEWAL_S))
            except LifeLostError:
                self._resend_all()
            except FencedError:
                self._resend_all()
                self.is_fenced = True
                logger.warning("prefix index: %s %s is not its youngest life", self.worker_id, self.epoch)
                await asyncio.sleep(self._settings.lease_s)
            except RedisUnavailableError as error:
                failures += 1
                self._resend_all()
                self._note_outage(error)
                await self._wait(min(5.0, 0.1 * 2 ** min(failures, 8)) * random.uniform(0.5, 1.0), only_time=True)

    async def _bring_up_to_date(self) -> None:
        self._take_queue()
        is_first = True  # without anything to send, the call renews the lease
        while is_first or self._slot is None or self._unsent:
            if self._slot is None:
                await self._send_all()
            else:
                await self._send_some(self._slot)
            is_first = False
            self._take_queue()
        self.is_synced = True
        self.is_fenced = False
        if self._is_down:
            self._is_down = False
            logger.info("prefix index: %s published everything again", self.worker_id)

    async def _send_all(self) -> None:
        """Fills a fresh slot with what the worker holds, then makes it the worker's in one step."""
        slot = await self._index.claim(self.worker_id, self.epoch, self._started_ms)
        position = self._held.position(self.worker_id)
        assert position is not None
        keys = self._held.keys(self.worker_id)
        self._unsent.clear()
        self._num_unsent_blocks = 0
        await self._index.fill(slot, tuple(keys))
        sequence = position[1]
        entry: Snapshot | SnapshotStored = SnapshotStored(self.worker_id, self.epoch, sequence)
        if len(keys) <= INLINE_SNAPSHOT_BLOCKS:
            entry = Snapshot(self.worker_id, self.epoch, sequence, tuple(BlockKey(key) for key in keys))
        await self._index.commit(slot, self._started_ms, entry)
        self._slot, self._sent_sequence = slot, sequence

    async def _send_some(self, slot: int) -> None:
        batches = self._unsent[:MAX_BATCHES_PER_CALL]
        await self._index.advance(self.worker_id, self.epoch, slot, self._sent_sequence, batches)
        del self._unsent[: len(batches)]
        self._num_unsent_blocks -= sum(map(_num_blocks, batches))
        if batches:
            self._sent_sequence = batches[-1].sequence

    def _take_queue(self) -> None:
        with self._lock:
            taken, self._queue = self._queue, deque()
        for item in taken:
            if isinstance(item, Snapshot):
                self._held.apply_snapshot(item)
                self._resend_all()
                continue
            position = self._held.position(self.worker_id)
            if position is not None and item.sequence <= position[1]:
                continue  # a repetition
            self._held.apply(item)
            self._unsent.append(item)
            self._num_unsent_blocks += _num_blocks(item)
            if _clears(item) or self._num_unsent_blocks > MAX_UNSENT_BLOCKS:
                self._resend_all()
        if taken and self._held.needs_snapshot:
            self._request_snapshot()

    def _resend_all(self) -> None:
        self.is_synced = False
        self._slot = None
        self._unsent.clear()
        self._num_unsent_blocks = 0

    def _note_outage(self, error: RedisUnavailableError) -> None:
        if not self._is_down:
            self._is_down = True
            self.num_outages += 1
            logger.warning("prefix index: %s cannot publish (%s); serving goes on without", self.worker_id, error)

    async def _wait(self, timeout_s: float, only_time: bool = False) -> None:
        if only_time:
            await asyncio.sleep(timeout_s)
            return
        try:
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        except TimeoutError:
            return
        self._wake.clear()


def _num_blocks(batch: EventBatch) -> int:
    return sum(len(event.keys) for event in batch.events if not isinstance(event, AllBlocksCleared))


def _clears(batch: EventBatch) -> bool:
    return any(isinstance(event, AllBlocksCleared) for event in batch.events)
