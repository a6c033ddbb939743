"""Takes what dead workers left out of the index in Redis, a few buckets at a time. Every publisher runs one."""

from __future__ import annotations

import asyncio
import random

from cache_service.redis_client import RedisUnavailableError
from cache_service.redis_index import RedisIndex

BUCKETS_PER_SWEEP = 32
PAUSE_S = 0.002


class Sweeper:
    """Buries workers whose lease ended a lease ago, sweeps dead slots, and renews the time to live of all buckets.

    A lock lets one sweeper work at a time; two at once would do no harm, since a slot is never used again.
    """

    def __init__(self, index: RedisIndex) -> None:
        self._index = index
        self._settings = index.settings

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s * random.uniform(0.5, 1.0))
            try:
                await self.sweep_once()
            except RedisUnavailableError:
                continue  # the publisher beside it reports outages

    async def sweep_once(self) -> None:
        status = await self._index.status()
        for worker_id, record in status.workers.items():
            if record.expires_ms + self._settings.lease_ms < status.now_ms:
                await self._index.bury(worker_id, record.epoch)
        is_refresh_due = await self._index.take_lock("refresh", self._settings.entry_ttl_s / 4)
        if is_refresh_due or (status.slots_to_sweep and await self._index.take_lock("sweep", self._settings.lease_s)):
            await self._sweep(status.slots_to_sweep)

    async def _sweep(self, slots: tuple[int, ...]) -> None:
        for shard in range(self._settings.num_shards):
            bucket, num_buckets = 0, 1
            while bucket < num_buckets:
                num_buckets = await self._index.sweep(shard, bucket, BUCKETS_PER_SWEEP, slots)
                bucket += BUCKETS_PER_SWEEP
                await asyncio.sleep(PAUSE_S)
        await self._index.forget_slots(slots)
