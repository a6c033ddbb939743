"""One way to drive every index: events go in, matches come out, whatever lies between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Protocol

from cache_service.events import BlockRemoved, BlockStored, EventBatch, Snapshot
from cache_service.index_follower import IndexFollower
from cache_service.index_publisher import IndexPublisher
from cache_service.prefix_index import InMemoryPrefixIndex
from cache_service.redis_client import GuardedRedis, RedisLimits
from cache_service.redis_index import IndexSettings, RedisIndex
from cache_service.redis_replies import WorkerRecord
from cluster.api.ids import BlockKey, WorkerId

# What a test waits for comes in milliseconds; a machine that stands still for seconds is no reason to fail.
PATIENCE_S = 60.0
PATIENT = RedisLimits(deadline_s=PATIENCE_S, slow_deadline_s=PATIENCE_S, socket_timeout_s=PATIENCE_S)


def key(number: int) -> BlockKey:
    return BlockKey(blake2b(number.to_bytes(8, "little"), digest_size=32).digest())


def keys(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(key(number) for number in numbers)


def stored(*numbers: int) -> BlockStored:
    return BlockStored(keys(*numbers))


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(keys(*numbers))


def prints(*numbers: int) -> frozenset[bytes]:
    return frozenset(key(number)[:8] for number in numbers)


def settings_of(namespace: str, **changes: int) -> IndexSettings:
    """Leases that no test outlives, however slow the machine: see `end_lease`."""
    return IndexSettings(namespace, **{"lease_s": 3600, **changes})


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.002)


async def eventually_equal(read: Callable[[], Awaitable[object]], wanted: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := await read()) != wanted:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.01)


async def end_lease(index: RedisIndex, worker_id: WorkerId) -> None:
    """As if the worker had said nothing for as long as its lease lasts, and as long again."""
    workers = f"ww:{{{index.settings.namespace}:0}}:workers"
    record: bytes = (await index.redis.run([("HGET", workers, worker_id)]))[0]
    await index.redis.run([("HSET", workers, worker_id, record.rpartition(b":")[0] + b":1")])


class Harness(Protocol):
    async def apply(self, batch: EventBatch) -> None: ...
    async def apply_snapshot(self, snapshot: Snapshot) -> None: ...
    async def drop_worker(self, worker_id: WorkerId) -> None: ...
    async def match(self, wanted: Sequence[BlockKey]) -> dict[WorkerId, int]: ...
    async def keys(self, worker_id: WorkerId) -> frozenset[bytes]: ...
    async def asked_for_snapshot(self) -> frozenset[WorkerId]: ...
    async def aclose(self) -> None: ...


class MemoryHarness:
    def __init__(self) -> None:
        self.index = InMemoryPrefixIndex()

    async def apply(self, batch: EventBatch) -> None:
        self.index.apply(batch)

    async def apply_snapshot(self, snapshot: Snapshot) -> None:
        self.index.apply_snapshot(snapshot)

    async def drop_worker(self, worker_id: WorkerId) -> None:
        self.index.drop_worker(worker_id)

    async def match(self, wanted: Sequence[BlockKey]) -> dict[WorkerId, int]:
        return self.index.match(wanted)

    async def keys(self, worker_id: WorkerId) -> frozenset[bytes]:
        return self.index.keys(worker_id)

    async def asked_for_snapshot(self) -> frozenset[WorkerId]:
        return self.index.needs_snapshot

    async def aclose(self) -> None:
        pass


class RedisHarness:
    """Publishers of each life of each worker, as the workers run them, and a reader of what stands in Redis."""

    def __init__(self, url: str, settings: IndexSettings) -> None:
        self.url = url
        self.settings = settings
        self.reader = RedisIndex(GuardedRedis(url, PATIENT), settings)
        self.asked: set[WorkerId] = set()
        self._publishers: dict[tuple[WorkerId, str], tuple[IndexPublisher, asyncio.Task[None]]] = {}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self._publishers.values()]

    async def publisher(self, worker_id: WorkerId, epoch: str) -> IndexPublisher:
        if (worker_id, epoch) not in self._publishers:
            await asyncio.sleep(0.003)  # lives of one worker begin in different milliseconds
            publisher = IndexPublisher(
                self.url,
                self.settings,
                worker_id,
                epoch,
                request_snapshot=lambda: self.asked.add(worker_id),
                limits=PATIENT,
                gather_s=0.0,
            )
            self._publishers[worker_id, epoch] = publisher, asyncio.create_task(publisher.run())
        return self._publishers[worker_id, epoch][0]

    async def apply(self, batch: EventBatch) -> None:
        publisher = await self.publisher(batch.worker_id, batch.epoch)
        publisher.publish(batch)
        await self.settle(publisher)

    async def apply_snapshot(self, snapshot: Snapshot) -> None:
        publisher = await self.publisher(snapshot.worker_id, snapshot.epoch)
        publisher.publish_snapshot(snapshot)
        await self.settle(publisher)

    async def drop_worker(self, worker_id: WorkerId) -> None:
        for (name, _), (_, task) in self._publishers.items():
            if name == worker_id:
                task.cancel()
        await self.reader.bury(worker_id)

    async def kill(self, worker_id: WorkerId, epoch: str = "e1") -> None:
        """The process of a worker is gone: nothing is said any more."""
        publisher, task = self._publishers[worker_id, epoch]
        task.cancel()
        await asyncio.wait({task})
        await eventually(lambda: publisher._redis.num_in_flight == 0)  # its last word has arrived

    async def settle(self, publisher: IndexPublisher) -> None:
        await eventually(lambda: publisher.is_fenced or (publisher.is_synced and publisher.num_unsent == 0))

    async def match(self, wanted: Sequence[BlockKey]) -> dict[WorkerId, int]:
        return await self.reader.match(wanted)

    async def keys(self, worker_id: WorkerId) -> frozenset[bytes]:
        return await self.reader.keys(worker_id)

    async def asked_for_snapshot(self) -> frozenset[WorkerId]:
        return frozenset(self.asked)

    async def aclose(self) -> None:
        for _, task in self._publishers.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in self._publishers.values()), return_exceptions=True)
        for publisher, _ in self._publishers.values():
            await publisher.aclose()
        await self.reader.redis.aclose()


class FollowerHarness(RedisHarness):
    """As above, read through a follower's in-memory index."""

    def __init__(self, url: str, settings: IndexSettings) -> None:
        super().__init__(url, settings)
        self.index = InMemoryPrefixIndex()
        self.follower = IndexFollower(url, settings, self.index, limits=PATIENT)
        self._following = asyncio.create_task(self.follower.run())

    async def catch_up(self) -> None:
        """Until the follower knows what stands in Redis now, or more."""
        status = await self.reader.status()
        await eventually(lambda: self.follower.is_synced and _order(self.follower.last_id) >= _order(status.last_id))
        # An entry that only says that a snapshot is stored has been read before the snapshot has.
        await eventually(lambda: all(self._knows(name, record) for name, record in status.alive().items()))
        await eventually(lambda: not self.index.needs_snapshot)

    def _knows(self, worker_id: WorkerId, record: WorkerRecord) -> bool:
        epoch, sequence = self.index.position(worker_id) or ("", -1)
        return epoch == record.epoch and sequence >= record.sequence

    async def match(self, wanted: Sequence[BlockKey]) -> dict[WorkerId, int]:
        await self.catch_up()
        return self.index.match(wanted)

    async def keys(self, worker_id: WorkerId) -> frozenset[bytes]:
        await self.catch_up()
        return self.index.keys(worker_id)

    async def aclose(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self.follower.aclose()
        await super().aclose()


def _order(stream_id: str) -> tuple[int, ...]:
    return tuple(map(int, stream_id.split("-")))
