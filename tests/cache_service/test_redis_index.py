"""What stands in Redis: layout, leases, fencing, and the end of what dead workers left."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from index_harness import (
    PATIENT,
    FollowerHarness,
    RedisHarness,
    end_lease,
    eventually,
    eventually_equal,
    keys,
    prints,
    settings_of,
    stored,
)
from tcp_proxy import TcpProxy

from cache_service.embedded import EmbeddedRedis
from cache_service.event_codec import SnapshotStored, WorkerDropped, decode, encode
from cache_service.events import AllBlocksCleared, BlockStored, EventBatch, Snapshot
from cache_service.index_follower import IndexFollower
from cache_service.index_publisher import IndexPublisher
from cache_service.prefix_index import InMemoryPrefixIndex
from cache_service.redis_client import GuardedRedis
from cache_service.redis_index import FencedError, IndexSettings, LifeLostError, RedisIndex, now_ms
from cache_service.sweeper import Sweeper
from cluster.api.ids import BlockKey, WorkerId

A, B = WorkerId("worker-a"), WorkerId("worker-b")


@pytest.fixture
async def harness(redis_server: EmbeddedRedis, namespace: str) -> AsyncIterator[FollowerHarness]:
    harness = FollowerHarness(redis_server.url, settings_of(namespace))
    yield harness
    await harness.aclose()


@pytest.fixture
async def index(redis_server: EmbeddedRedis, namespace: str) -> AsyncIterator[RedisIndex]:
    redis = GuardedRedis(redis_server.url, PATIENT)
    yield RedisIndex(redis, settings_of(namespace))
    await redis.aclose()


async def test_a_dead_worker_is_forgotten_and_swept(harness: FollowerHarness) -> None:
    await harness.apply(EventBatch(A, "e1", 1, (stored(*range(500)),)))
    await harness.apply(EventBatch(B, "e1", 1, (stored(*range(100)),)))
    assert await harness.match(keys(*range(64))) == {A: 64, B: 64}
    slot = (await harness.reader.status()).workers[A].slot
    await harness.kill(A)
    await end_lease(harness.reader, A)
    assert await harness.reader.match(keys(*range(64))) == {B: 64}
    sweeper = Sweeper(harness.reader)
    await sweeper.sweep_once()
    assert await harness.match(keys(*range(64))) == {B: 64}
    await sweeper.sweep_once()
    assert await harness.reader.dump(frozenset({slot})) == {slot: []}
    assert await harness.reader.keys(B) == prints(*range(100))
    assert await _num_blocks(harness.reader) == 100
    assert (await harness.reader.status()).slots_to_sweep == ()


async def test_every_publisher_sweeps(redis_server: EmbeddedRedis, namespace: str, index: RedisIndex) -> None:
    start = now_ms()
    slot = await index.claim(A, "e", start)
    await index.fill(slot, sorted(prints(*range(100))))
    await index.commit(slot, start, Snapshot(A, "e", 0, keys(*range(100))))
    await end_lease(index, A)
    assert await index.dump(frozenset({slot})) != {slot: []}
    publisher = IndexPublisher(redis_server.url, IndexSettings(namespace, lease_s=0.5), B, "e", limits=PATIENT)
    running = asyncio.create_task(publisher.run())
    await eventually_equal(lambda: index.dump(frozenset({slot})), {slot: []})
    assert A not in (await index.status()).workers
    running.cancel()
    await asyncio.wait({running})
    await publisher.aclose()


async def test_a_follower_forgets_who_stays_away(redis_server: EmbeddedRedis, harness: FollowerHarness) -> None:
    """Without a word of a sweeper: the lease has been over for as long as it lasts."""
    await harness.apply(EventBatch(A, "e1", 1, (stored(1),)))
    await harness.apply(EventBatch(B, "e1", 1, (stored(1),)))
    index = InMemoryPrefixIndex()
    settings = replace(harness.settings, lease_s=0.5)
    follower = IndexFollower(redis_server.url, settings, index, limits=PATIENT)
    following = asyncio.create_task(follower.run())
    await eventually(lambda: index.match(keys(1)) == {A: 1, B: 1})
    await harness.kill(A)
    await end_lease(harness.reader, A)
    await eventually(lambda: index.match(keys(1)) == {B: 1})
    following.cancel()
    await asyncio.wait({following})
    await follower.aclose()


async def test_a_worker_that_slept_longer_than_its_lease_returns(
    redis_server: EmbeddedRedis, harness: FollowerHarness
) -> None:
    """Suspended, not dead: buried by others, and welcome again with its own epoch."""
    async with TcpProxy(redis_server.port) as proxy:
        url = redis_server.url.replace(f":{redis_server.port}/", f":{proxy.port}/")
        sleeper = RedisHarness(url, harness.settings)
        await sleeper.apply(EventBatch(A, "e1", 1, (stored(1, 2),)))
        assert await harness.match(keys(1, 2)) == {A: 2}
        proxy.passing.clear()
        await harness.reader.bury(A)
        await eventually(lambda: harness.index.match(keys(1, 2)) == {})
        proxy.passing.set()
        await eventually(lambda: harness.index.match(keys(1, 2)) == {A: 2})
        await sleeper.apply(EventBatch(A, "e1", 2, (stored(3),)))
        assert await harness.match(keys(1, 2, 3)) == {A: 3}
        await sleeper.aclose()


async def test_a_clean_farewell_is_followed_at_once(harness: FollowerHarness) -> None:
    await harness.apply(EventBatch(A, "e1", 1, (stored(1),)))
    assert await harness.match(keys(1)) == {A: 1}
    publisher = await harness.publisher(A, "e1")
    await harness.kill(A)
    await publisher.aclose()
    assert await harness.match(keys(1)) == {}


async def test_an_older_life_is_fenced_off(index: RedisIndex) -> None:
    old_start = now_ms()
    old_slot = await index.claim(A, "old", old_start)
    await index.fill(old_slot, sorted(prints(1)))
    await index.commit(old_slot, old_start, Snapshot(A, "old", 0, keys(1)))
    slot = await index.claim(A, "new", old_start + 1)
    await index.commit(slot, old_start + 1, Snapshot(A, "new", 0, ()))
    with pytest.raises(FencedError):
        await index.advance(A, "old", old_slot, 0, [EventBatch(A, "old", 1, (stored(2),))])
    with pytest.raises(FencedError):
        await index.claim(A, "old", old_start)
    assert await index.match(keys(1)) == {}
    assert await index.match(keys(2)) == {}


async def test_a_younger_life_whose_clock_is_behind_waits_for_the_lease(index: RedisIndex) -> None:
    start = now_ms()
    slot = await index.claim(A, "old", start)
    await index.commit(slot, start, Snapshot(A, "old", 0, ()))
    with pytest.raises(FencedError):
        await index.claim(A, "new", start - 60_000)
    await end_lease(index, A)
    slot = await index.claim(A, "new", start - 60_000)
    await index.commit(slot, start - 60_000, Snapshot(A, "new", 0, ()))
    assert (await index.status()).workers[A].epoch == "new"


async def test_a_position_that_redis_does_not_know_is_lost(index: RedisIndex) -> None:
    """As after a failover to a replica that missed the last writes."""
    start = now_ms()
    slot = await index.claim(A, "e", start)
    await index.commit(slot, start, Snapshot(A, "e", 3, ()))
    await index.advance(A, "e", slot, 3, [EventBatch(A, "e", 4, (stored(1),))])
    with pytest.raises(LifeLostError):
        await index.advance(A, "e", slot, 6, [EventBatch(A, "e", 7, (stored(2),))])
    with pytest.raises(LifeLostError):
        await index.advance(B, "e", slot, 0)


async def test_a_slot_that_is_never_committed_counts_for_nothing(index: RedisIndex) -> None:
    slot = await index.claim(A, "e", now_ms())
    await index.fill(slot, sorted(prints(1, 2)))
    assert await index.match(keys(1, 2)) == {}
    assert await index.dump(frozenset({slot})) != {slot: []}


async def test_buckets_grow_in_number_and_stay_compact(index: RedisIndex, namespace: str) -> None:
    start = now_ms()
    slot = await index.claim(A, "e", start)
    await index.fill(slot, sorted(prints(*range(20_000))))
    await index.commit(slot, start, SnapshotStored(A, "e", 0))
    names = (await index.redis.run([("KEYS", f"ww:{{{namespace}:0}}:b:*")]))[0]
    assert 20_000 / 64 <= len(names) <= 2 * 20_000 / 64
    encodings = await index.redis.run([("OBJECT", "ENCODING", name) for name in names])
    assert set(encodings) == {b"listpack"}
    lengths = await index.redis.run([("HLEN", name) for name in names])
    assert sum(lengths) == 20_000
    assert max(lengths) < 256
    lives = await index.redis.run([("TTL", name) for name in names])
    assert all(0 < life <= 3600 for life in lives), "what nobody renews, goes"
    assert await index.keys(A) == prints(*range(20_000))


async def test_the_sweeper_renews_what_lives(index: RedisIndex, namespace: str) -> None:
    start = now_ms()
    slot = await index.claim(A, "e", start)
    await index.fill(slot, sorted(prints(*range(100))))
    await index.commit(slot, start, SnapshotStored(A, "e", 0))
    names = (await index.redis.run([("KEYS", f"ww:{{{namespace}:0}}:b:*")]))[0]
    await index.redis.run([("EXPIRE", name, 60) for name in names])
    await Sweeper(index).sweep_once()
    assert min(await index.redis.run([("TTL", name) for name in names])) > 3000


async def test_no_command_walks_the_key_space(redis_server: EmbeddedRedis, harness: FollowerHarness) -> None:
    await harness.reader.redis.run([("CONFIG", "RESETSTAT")])
    await harness.apply(EventBatch(A, "e1", 1, (stored(*range(500)),)))
    await harness.apply(EventBatch(A, "e1", 2, (AllBlocksCleared(), stored(1))))
    await harness.match(keys(1))
    await harness.reader.match(keys(1))
    await harness.reader.keys(A)
    await Sweeper(harness.reader).sweep_once()

    # A follower that comes late finds all of this stored, and only then waits for an entry.
    async def is_complete() -> bool:
        return {"eval", "xread", "hget"} <= await _commands_used(harness.reader)

    await eventually_equal(is_complete, True)
    assert not await _commands_used(harness.reader) & {"keys", "scan", "hscan", "smembers", "flushdb"}


@pytest.mark.parametrize(
    "entry",
    [
        EventBatch(A, "e1", 5, (BlockStored(keys(1, 2)), AllBlocksCleared(), stored(3))),
        EventBatch(A, "e1", 2**63, ()),
        Snapshot(A, "e1", 7, keys(1, 2, 3)),
        SnapshotStored(WorkerId("工人"), "e1", 7),
        WorkerDropped(A, "e1"),
    ],
)
def test_stream_entries_survive_the_wire_with_their_keys_cut(entry: EventBatch) -> None:
    decoded = decode(encode(entry))
    assert encode(decoded) == encode(entry)
    assert type(decoded) is type(entry)
    assert decoded.worker_id == entry.worker_id


def test_a_whole_key_is_cut_to_its_fingerprint() -> None:
    decoded = decode(encode(Snapshot(A, "e1", 7, keys(1))))
    assert isinstance(decoded, Snapshot)
    assert decoded.keys == (BlockKey(keys(1)[0][:8]),)


def test_a_stream_entry_that_ends_early_is_refused() -> None:
    whole = encode(EventBatch(A, "e1", 5, (stored(1, 2),)))
    without_events = encode(EventBatch(A, "e1", 5, ()))
    for cut in range(len(whole)):
        if cut != len(without_events):  # there it happens to be another entry
            with pytest.raises(ValueError, match=r"stream entry|worker id|epoch|fingerprints"):
                decode(whole[:cut])


@pytest.mark.parametrize(("worker_id", "epoch"), [("", "e"), ("w", ""), ("w" * 256, "e"), ("w", "a:b")])
def test_names_that_no_index_can_hold_are_refused(worker_id: str, epoch: str) -> None:
    with pytest.raises(ValueError, match=r"worker id|epoch"):
        encode(WorkerDropped(WorkerId(worker_id), epoch))


def test_a_publisher_refuses_events_of_others(redis_server: EmbeddedRedis, namespace: str) -> None:
    publisher = IndexPublisher(redis_server.url, settings_of(namespace), A, "e1")
    with pytest.raises(ValueError, match="publisher of worker-a e1 was given worker-b e1"):
        publisher.publish(EventBatch(B, "e1", 1, ()))
    with pytest.raises(ValueError, match="was given worker-a e2"):
        publisher.publish_snapshot(Snapshot(A, "e2", 1, ()))


@pytest.mark.parametrize(("gather_s", "is_one_call_each"), [(0.0, True), (0.3, False)])
async def test_batches_of_a_moment_go_in_one_call(
    redis_server: EmbeddedRedis,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    gather_s: float,
    is_one_call_each: bool,
) -> None:
    calls: list[int] = []
    advance = RedisIndex.advance

    async def counted(index: RedisIndex, *args: Any) -> None:
        calls.extend([len(args[-1])] if args[-1] else [])
        await advance(index, *args)

    monkeypatch.setattr(RedisIndex, "advance", counted)
    publisher = IndexPublisher(redis_server.url, settings_of(namespace), A, "e1", gather_s=gather_s, limits=PATIENT)
    running = asyncio.create_task(publisher.run())
    await eventually(lambda: publisher.is_synced)
    for sequence in range(1, 11):
        publisher.publish(EventBatch(A, "e1", sequence, (stored(sequence),)))
        await asyncio.sleep(0.001)
        if is_one_call_each:
            await eventually(lambda: publisher.num_unsent == 0)
    await eventually(lambda: publisher.num_unsent == 0)
    assert sum(calls) == 10
    assert (len(calls) == 10) is is_one_call_each
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await publisher.aclose()


async def _num_blocks(index: RedisIndex) -> int:
    directory = f"ww:{{{index.settings.namespace}:0}}:dir"
    return int((await index.redis.run([("HGET", directory, "blocks")]))[0])


async def _commands_used(index: RedisIndex) -> set[str]:
    """Since the statistics were reset; `config` without `|resetstat`."""
    stats = (await index.redis.run([("INFO", "commandstats")]))[0]
    names = stats if isinstance(stats, dict) else stats.decode().splitlines()
    return {re.split(r"[:|]", name.partition("_")[2])[0] for name in names}
