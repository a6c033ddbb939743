"""One way to drive every index: events go in, matches come out, whatever lies between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

from cache_service.events import BlockRemoved, BlockStored, EventBatch, Snapshot
from cache_service.index_follower import IndexFollower
from cache_service.index_publisher import IndexPublisher
from cache_service.prefix_index import InMemoryPrefixIndex
from cache_service.redis_client import GuardedRedis, RedisLimits
from cache_service.redis_index import IndexSettings, RedisIndex
from cluster.api.ids import BlockKey, WorkerId

PATIENT = RedisLimits(deadline_s=5.0)


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


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


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

    async def settle(self, publisher: IndexPublisher) -> None:
        await eventually(
            lambda: publisher.is_fenced or (publisher.is_synced and publisher.num_unsent == 0), timeout_s=20
        )

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
        last_id = (await self.reader.status()).last_id
        await eventually(lambda: self.follower.is_synced and self.follower.last_id == last_id)
        await eventually(lambda: not self.index.needs_snapshot)

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
