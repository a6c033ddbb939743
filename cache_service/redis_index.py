"""The prefix index in Redis: what workers write there and what anyone may look up. Layout: redis_scripts.py.

Nothing here is on the request path of Watchword's own router, which answers from memory (index_follower.py). Redis sees
fingerprints of keyed hashes, worker ids and epochs: no token ids, text or identities.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cache_service import redis_scripts as scripts
from cache_service.event_codec import SnapshotStored, WorkerDropped, check_names, encode
from cache_service.events import EventBatch, Snapshot
from cache_service.fingerprints import FINGERPRINT_BYTES, net_effect
from cache_service.redis_client import Command, GuardedRedis, RedisUnavailableError
from cache_service.redis_replies import (
    SLOT_END,
    IndexStatus,
    entry_payload,
    leading,
    parse_dump,
    parse_owners,
    parse_status,
    parse_workers,
    streams_of,
)
from cluster.api.ids import BlockKey, WorkerId

# One script call blocks Redis for about 2 ms with this many fingerprints.
PRINTS_PER_CALL = 512
BUCKETS_PER_DUMP = 32
UNCOMMITTED_SLOT_MS = 600_000


class FencedError(Exception):
    """A younger life of the same worker has taken over; this one must stop writing."""


class LifeLostError(Exception):
    """Redis no longer knows this life (restarted empty, lease over): claim anew with a snapshot."""


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """`namespace` names the model (letters, digits, `-_.`). All parties of one index need equal namespace and shards.

    `num_shards` spreads the entries over the nodes of a Redis Cluster; a lookup then asks that many nodes at once.
    """

    namespace: str
    num_shards: int = 1
    lease_s: float = 15.0
    entry_ttl_s: int = 3600
    stream_length: int = 4096

    def __post_init__(self) -> None:
        if not self.namespace or not set(self.namespace) <= _NAMESPACE_CHARACTERS or len(self.namespace) > 128:
            raise ValueError(f"namespace is {self.namespace!r}, allowed are 1 to 128 letters, digits, '-', '_' and '.'")
        if not 1 <= self.num_shards <= 256:
            raise ValueError(f"num_shards is {self.num_shards}, allowed are 1 to 256")
        if not 0.5 <= self.lease_s <= 3600:
            raise ValueError(f"lease_s is {self.lease_s}, allowed are 0.5 to 3600")
        if not 60 <= self.entry_ttl_s <= 604_800:
            raise ValueError(f"entry_ttl_s is {self.entry_ttl_s}, allowed are 60 to 604800")
        if not 16 <= self.stream_length <= 1_000_000:
            raise ValueError(f"stream_length is {self.stream_length}, allowed are 16 to 1000000")

    @property
    def lease_ms(self) -> int:
        return int(self.lease_s * 1000)


_NAMESPACE_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


class RedisIndex:
    """Raises RedisUnavailableError from every call. `position`s of lives are the caller's (index_publisher.py)."""

    def __init__(self, redis: GuardedRedis, settings: IndexSettings) -> None:
        self.settings = settings
        self.redis = redis
        self._keys = scripts.Keys(settings.namespace)

    async def claim(self, worker_id: WorkerId, epoch: str, started_ms: int) -> int:
        """A fresh slot, not yet the worker's. Raises FencedError."""
        check_names(worker_id, epoch)
        first_slot = secrets.randbelow(1 << 30)  # so that slots of a lost incarnation mean nothing to the next
        candidate = secrets.token_hex(8)
        reply = (
            await self.redis.run_slow(
                [self._control(scripts.CLAIM, worker_id, epoch, started_ms, candidate, first_slot, UNCOMMITTED_SLOT_MS)]
            )
        )[0]
        if reply[0] != b"OK":
            raise FencedError
        slot = int(reply[1])
        if not 0 <= slot < SLOT_END:
            raise RedisUnavailableError("the index has no valid slot to give")
        return slot

    async def fill(self, slot: int, stored: Sequence[bytes], removed: Sequence[bytes] = ()) -> None:
        """Adds the slot to the owners of `stored` and takes it from those of `removed` (disjoint fingerprints)."""
        for start in range(0, max(len(stored), len(removed)), PRINTS_PER_CALL):
            stop = start + PRINTS_PER_CALL
            await self.redis.run_slow(self._apply_commands(slot, stored[start:stop], removed[start:stop]))

    async def commit(self, slot: int, started_ms: int, entry: Snapshot | SnapshotStored | EventBatch) -> None:
        """Makes a filled slot the worker's and tells the followers `entry`. Raises FencedError."""
        command = self._control(
            scripts.COMMIT,
            entry.worker_id,
            entry.epoch,
            started_ms,
            slot,
            entry.sequence,
            self.settings.lease_ms,
            self.settings.stream_length,
            encode(entry),
        )
        if (await self.redis.run_slow([command]))[0] != b"OK":
            raise FencedError

    async def advance(
        self, worker_id: WorkerId, epoch: str, slot: int, sequence: int, batches: Sequence[EventBatch] = ()
    ) -> None:
        """Applies batches that follow `sequence`, in one pipeline; without any it just renews the lease.

        None of them may clear. Raises FencedError, LifeLostError.
        """
        stored, removed = _final(batches)
        commands: list[Command] = []
        for start in range(0, max(len(stored), len(removed)), PRINTS_PER_CALL):
            stop = start + PRINTS_PER_CALL
            commands += self._apply_commands(slot, stored[start:stop], removed[start:stop])
        lengths = (self.settings.lease_ms, self.settings.stream_length)
        payloads = [encode(batch) for batch in batches]
        after = batches[-1].sequence if batches else sequence
        commands.append(self._control(scripts.ADVANCE, worker_id, epoch, slot, sequence, after, *lengths, *payloads))
        reply = (await self.redis.run_slow(commands))[-1]
        if reply == b"FENCED":
            raise FencedError
        if reply != b"OK":
            raise LifeLostError

    async def bury(self, worker_id: WorkerId, epoch: str = "") -> None:
        """Takes a dead worker off the list; its entries count no more and are swept later."""
        payload = encode(WorkerDropped(worker_id, epoch or "any"))
        await self.redis.run_slow([self._control(scripts.BURY, self.settings.stream_length, payload, worker_id, epoch)])

    async def status(self) -> IndexStatus:
        return parse_status((await self.redis.run_slow([self._control(scripts.STATUS)]))[0])

    async def match(self, keys: Sequence[BlockKey], deadline_s: float | None = None) -> dict[WorkerId, int]:
        """Leading blocks that each live worker holds: one round trip per shard, all at once."""
        shards: list[list[bytes]] = [[] for _ in range(self.settings.num_shards)]
        for key in keys:
            shards[self._shard(key)].append(key[:FINGERPRINT_BYTES])
        asked = [shard for shard, prints in enumerate(shards) if prints]
        commands = [self._data(scripts.LOOKUP, shard, b"".join(shards[shard])) for shard in asked]
        *replies, (now, flat) = await self.redis.run([*commands, self._control(scripts.ALIVE)], deadline_s)
        owners = {shard: parse_owners(reply) for shard, reply in zip(asked, replies, strict=True)}
        alive = {each.slot: name for name, each in parse_workers(flat).items() if each.expires_ms >= int(now)}
        return leading((next(owners[self._shard(key)], ()) for key in keys), alive)

    async def dump(self, slots: frozenset[int]) -> dict[int, list[bytes]]:
        """Slot -> fingerprints it owns. Reads everything in small steps: for bootstrap and audits."""
        held: dict[int, list[bytes]] = {slot: [] for slot in slots}
        for shard in range(self.settings.num_shards):
            bucket, num_buckets = 0, 1
            while bucket < num_buckets:
                command = self._data(scripts.DUMP, shard, bucket, BUCKETS_PER_DUMP)
                num_buckets, packed = (await self.redis.run_slow([command]))[0]
                for print_, owners in parse_dump(packed):
                    for slot in owners:
                        if slot in held:
                            held[slot].append(print_)
                bucket += BUCKETS_PER_DUMP
        return held

    async def keys(self, worker_id: WorkerId) -> frozenset[bytes]:
        """Fingerprints of what a worker holds. Reads everything: for tests and audits."""
        record = (await self.status()).workers.get(worker_id)
        return frozenset() if record is None else frozenset((await self.dump(frozenset({record.slot})))[record.slot])

    async def read_stream(self, after: str, block_ms: int, count: int = 256) -> list[tuple[str, bytes]]:
        """Entries after stream id `after`, waiting up to `block_ms` for one. Malformed ones come as b""."""
        command = ("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", self._keys.stream, after)
        deadline_s = block_ms / 1000 + self.redis.limits.slow_deadline_s
        reply = (await self.redis.run([command], deadline_s))[0]
        return [
            (entry_id.decode(), entry_payload(fields))
            for _, entries in streams_of(reply)
            for entry_id, fields in entries
        ]

    async def take_lock(self, name: str, hold_s: float) -> bool:
        """True for one caller in `hold_s`: who does the work that only one need do."""
        command = ("SET", self._keys.lock(name), "1", "NX", "PX", int(hold_s * 1000))
        return (await self.redis.run_slow([command]))[0] is not None

    async def sweep(self, shard: int, bucket: int, count: int, dead_slots: Sequence[int]) -> int:
        """Takes dead slots out of some buckets and renews the time to live of these; returns how many there are."""
        packed = struct.pack(f"<{len(dead_slots)}I", *dead_slots)
        command = self._data(scripts.SWEEP, shard, bucket, count, packed, self.settings.entry_ttl_s)
        return int((await self.redis.run_slow([command]))[0])

    async def forget_slots(self, slots: Sequence[int]) -> None:
        if slots:
            await self.redis.run_slow([("ZREM", self._keys.dead, *slots)])

    def _shard(self, key: bytes) -> int:
        # Not the bits that choose the bucket (bytes 0 to 3).
        return key[7] % self.settings.num_shards

    def _apply_commands(self, slot: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> list[Command]:
        owner, ttl = struct.pack("<I", slot), self.settings.entry_ttl_s
        return [
            self._data(scripts.APPLY, shard, owner, b"".join(new), b"".join(old), ttl)
            for shard in range(self.settings.num_shards)
            for new, old in [self._of_shard(shard, stored, removed)]
            if new or old
        ]

    def _of_shard(self, shard: int, *lists: Sequence[bytes]) -> list[list[bytes]]:
        return [[each for each in prints if self._shard(each) == shard] for prints in lists]

    def _data(self, script: str, shard: int, *arguments: object) -> Command:
        return ("EVAL", script, 1, self._keys.directory(shard), self._keys.bucket_prefix(shard), *arguments)

    def _control(self, script: str, *arguments: object) -> Command:
        return ("EVAL", script, 4, *self._keys.control, *arguments)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _final(batches: Sequence[EventBatch]) -> tuple[list[bytes], list[bytes]]:
    cleared, held = net_effect(event for batch in batches for event in batch.events)
    assert not cleared, "a batch that clears everything is published as a new slot"
    return [key for key, is_held in held.items() if is_held], [key for key, is_held in held.items() if not is_held]
