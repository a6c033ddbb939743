"""Redis slow, cut off, killed, full of lies, or left by cancelled callers: the index is late or poorer, never wrong."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from index_harness import (
    PATIENCE_S,
    PATIENT,
    FollowerHarness,
    RedisHarness,
    eventually,
    eventually_equal,
    key,
    keys,
    prints,
    settings_of,
    stored,
)
from tcp_proxy import TcpProxy

from cache_service.breaker import CircuitBreaker
from cache_service.embedded import EmbeddedRedis
from cache_service.events import EventBatch
from cache_service.index_publisher import IndexPublisher
from cache_service.redis_client import GuardedRedis, RedisLimits, RedisUnavailableError
from cache_service.redis_index import RedisIndex
from cache_service.sweeper import Sweeper
from cluster.api.ids import WorkerId

A, B = WorkerId("worker-a"), WorkerId("worker-b")


def via(server: EmbeddedRedis, proxy: TcpProxy) -> str:
    return server.url.replace(f":{server.port}/", f":{proxy.port}/")


@pytest.fixture
async def redis(redis_server: EmbeddedRedis) -> AsyncIterator[GuardedRedis]:
    client = GuardedRedis(redis_server.url, PATIENT)
    yield client
    await client.aclose()


async def test_cancelled_commands_never_shift_replies(redis_server: EmbeddedRedis, redis: GuardedRedis) -> None:
    """30 % of 600 reads through a slow proxy are cancelled in flight; every other reply names its own key."""
    dice = random.Random(3)
    await redis.run([("SET", f"storm:{number}", f"value of {number}") for number in range(600)])
    async with TcpProxy(redis_server.port, delay_s=0.02) as proxy:
        limits = replace(PATIENT, max_in_flight=12)
        stormy = GuardedRedis(via(redis_server, proxy), limits, CircuitBreaker(threshold=10_000))
        counts = {"right": 0, "cancelled": 0}

        async def read(number: int) -> None:
            replies = await stormy.run([("GET", f"storm:{number}"), ("ECHO", f"echo {number}")])
            assert replies == [f"value of {number}".encode(), f"echo {number}".encode()]
            counts["right"] += 1

        async def reader(numbers: range) -> None:
            for number in numbers:
                await eventually(lambda: stormy.num_in_flight <= limits.max_in_flight - 6)  # abandoned ones run on
                task = asyncio.create_task(read(number))
                if dice.random() < 0.3:
                    await asyncio.sleep(dice.uniform(0, 0.02))
                    if task.cancel():
                        counts["cancelled"] += 1
                await asyncio.wait({task})
                assert task.cancelled() or task.exception() is None, task

        await asyncio.gather(*(reader(range(start, 600, 6)) for start in range(6)))
        assert counts["cancelled"] > 100
        assert counts["right"] == 600 - counts["cancelled"]
        await eventually(lambda: stormy.num_in_flight == 0)
        assert proxy.num_connections <= limits.max_in_flight + 1
        await stormy.aclose()


async def test_a_naive_client_is_shifted_by_the_same_cancellation(redis_server: EmbeddedRedis) -> None:
    """What the storm above would show: here a cancelled read leaves its reply to the next caller."""
    async with TcpProxy(redis_server.port) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        password = redis_server.url.split(":")[2].partition("@")[0]

        async def command(line: str) -> bytes:
            writer.write(line.encode() + b"\r\n")
            return await reader.readline()

        assert await command(f"AUTH {password}") == b"+OK\r\n"
        proxy.passing.clear()
        cancelled = asyncio.create_task(command("PING"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        proxy.passing.set()
        assert await command("INCR naive") == b"+PONG\r\n"
        writer.close()


async def test_lookups_keep_to_their_prompt_under_a_cancel_storm(redis_server: EmbeddedRedis, namespace: str) -> None:
    settings = settings_of(namespace)
    harness = RedisHarness(redis_server.url, settings)
    for number in range(20):
        await harness.apply(EventBatch(WorkerId(f"w{number}"), "e", 1, (stored(number, number + 100),)))
    async with TcpProxy(redis_server.port) as proxy:
        index = RedisIndex(GuardedRedis(via(redis_server, proxy), replace(PATIENT, max_in_flight=40)), settings)
        dice = random.Random(5)

        async def ask(number: int) -> bool:
            return await index.match(keys(number, number + 100)) == {WorkerId(f"w{number}"): 2}

        for _ in range(10):
            proxy.passing.clear()
            tasks = [asyncio.create_task(ask(number)) for number in range(20)]
            await eventually(lambda: index.redis.num_in_flight == 20)
            doomed = [task for task in tasks if dice.random() < 0.3]
            assert doomed
            assert all(task.cancel() for task in doomed)
            proxy.passing.set()
            done, _ = await asyncio.wait(tasks)
            assert [task.cancelled() for task in tasks] == [task in doomed for task in tasks]
            assert all(task.result() for task in done if not task.cancelled())
            await eventually(lambda: index.redis.num_in_flight == 0)
        await index.redis.aclose()
    await harness.aclose()


async def test_a_slow_redis_costs_no_more_than_the_deadline(redis_server: EmbeddedRedis) -> None:
    async with TcpProxy(redis_server.port) as proxy:
        proxy.passing.clear()
        breaker = CircuitBreaker(clock=lambda: 0.0)  # it never comes to a probe
        slow = GuardedRedis(via(redis_server, proxy), replace(PATIENT, deadline_s=0.02), breaker)
        for _ in range(3):
            begin = time.perf_counter()
            with pytest.raises(RedisUnavailableError, match="did not answer in time"):
                await slow.run([("PING",)])
            assert time.perf_counter() - begin >= 0.019, "it waits for its deadline"
        assert slow.num_in_flight == 3, "the answer is still awaited, by nobody"
        for _ in range(20):
            with pytest.raises(RedisUnavailableError, match="known to be down"):
                slow.run([("PING",)]).send(None)  # once the circuit is open nobody waits, not for a moment
        proxy.passing.set()
        await eventually(lambda: slow.num_in_flight == 0)
        assert slow.breaker.is_open, "answers that come too late are no sign of health"
        await slow.aclose()


async def test_the_circuit_closes_again(redis_server: EmbeddedRedis) -> None:
    async with TcpProxy(redis_server.port) as proxy:
        now = [0.0]
        breaker = CircuitBreaker(clock=lambda: now[0])
        client = GuardedRedis(via(redis_server, proxy), replace(PATIENT, deadline_s=0.02), breaker)
        proxy.passing.clear()
        for _ in range(5):
            with pytest.raises(RedisUnavailableError):
                await client.run([("PING",)])
        assert breaker.is_open
        proxy.passing.set()
        with pytest.raises(RedisUnavailableError, match="known to be down"):
            await client.run([("ECHO", "too soon")], PATIENCE_S)
        now[0] = 60.0
        assert await client.run([("ECHO", "again")], PATIENCE_S) == [b"again"]
        assert not breaker.is_open
        await client.aclose()


async def test_calls_in_flight_are_bounded(redis_server: EmbeddedRedis) -> None:
    async with TcpProxy(redis_server.port) as proxy:
        proxy.passing.clear()
        client = GuardedRedis(via(redis_server, proxy), replace(PATIENT, max_in_flight=4))
        calls = [asyncio.create_task(client.run([("PING",)])) for _ in range(10)]
        await eventually(lambda: sum(call.done() for call in calls) == 6)
        assert client.num_in_flight == 4
        proxy.passing.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(each, RedisUnavailableError) for each in outcomes) == 6
        assert sum(each in ([b"PONG"], [True]) for each in outcomes) == 4
        await client.aclose()


async def test_the_index_heals_after_redis_is_killed(namespace: str) -> None:
    """kill -9, events while it is away, back empty on the same port: equal to the workers' contents again."""
    server = EmbeddedRedis(max_memory_mb=64)
    server.start()
    harness = FollowerHarness(server.url, settings_of(namespace))
    reader = RedisIndex(GuardedRedis(server.url, PATIENT), harness.settings)
    try:
        await harness.apply(EventBatch(A, "e1", 1, (stored(*range(3000)),)))
        await harness.apply(EventBatch(B, "e1", 1, (stored(*range(10)),)))
        assert await harness.match(keys(*range(64))) == {A: 64, B: 10}
        first = await reader.status()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        publisher = await harness.publisher(A, "e1")
        publisher.publish(EventBatch(A, "e1", 2, (stored(5000),)))
        assert harness.index.match(keys(*range(64))) == {A: 64, B: 10}, "routing goes on with what is known"
        await eventually(lambda: server.num_respawns == 1)
        await eventually_equal(lambda: reader.keys(A), prints(*range(3000), 5000))
        await eventually_equal(lambda: reader.keys(B), prints(*range(10)))
        again = await reader.status()
        assert again.incarnation != first.incarnation
        assert again.run_id != first.run_id
        assert await harness.keys(A) == prints(*range(3000), 5000)
        await harness.apply(EventBatch(B, "e1", 2, (stored(10),)))
        assert await harness.match(keys(*range(64))) == {A: 64, B: 11}
    finally:
        await reader.redis.aclose()
        await harness.aclose()
        server.stop()


async def test_publishing_never_waits_for_redis(redis_server: EmbeddedRedis, namespace: str) -> None:
    """Nor for the event loop: here neither gets a turn until all is published."""
    async with TcpProxy(redis_server.port) as proxy:
        proxy.passing.clear()
        limits = RedisLimits(slow_deadline_s=0.02)
        publisher = IndexPublisher(via(redis_server, proxy), settings_of(namespace), A, "e1", limits=limits)
        running = asyncio.create_task(publisher.run())
        await eventually(lambda: proxy.num_connections >= 1)
        for sequence in range(1, 2001):
            publisher.publish(EventBatch(A, "e1", sequence, (stored(sequence),)))
        assert publisher.num_unsent == 2000
        await eventually(lambda: publisher.num_unsent == 0)  # not kept: a snapshot will replace it
        await eventually(lambda: proxy.num_connections >= 3)
        assert publisher.num_outages == 1, "one outage is told once"
        assert not running.done()
        running.cancel()
        await asyncio.wait({running})
        await publisher.aclose()


async def test_a_flushed_redis_is_filled_again(redis_server: EmbeddedRedis, namespace: str) -> None:
    """Same server, same run id, but the data is gone."""
    harness = FollowerHarness(redis_server.url, settings_of(namespace))
    await harness.apply(EventBatch(A, "e1", 1, (stored(1, 2),)))
    assert await harness.match(keys(1, 2)) == {A: 2}
    await _delete_namespace(harness.reader.redis, namespace)
    await harness.apply(EventBatch(A, "e1", 2, (stored(3),)))
    assert await harness.reader.match(keys(1, 2, 3)) == {A: 3}
    assert await harness.match(keys(1, 2, 3)) == {A: 3}
    await harness.aclose()


async def test_a_trimmed_stream_leads_to_the_stored_entries(redis_server: EmbeddedRedis, namespace: str) -> None:
    """The follower sleeps while more happens than the stream holds."""
    settings = settings_of(namespace, stream_length=16)
    async with TcpProxy(redis_server.port) as proxy:
        harness = FollowerHarness(via(redis_server, proxy), settings)
        direct = RedisHarness(redis_server.url, settings)
        await direct.apply(EventBatch(A, "e1", 1, (stored(0),)))
        await eventually(lambda: harness.index.match(keys(0)) == {A: 1})
        before = harness.follower.counters.resyncs
        proxy.passing.clear()
        for sequence in range(2, 41):
            await direct.apply(EventBatch(A, "e1", sequence, (stored(sequence - 1),)))
        await direct.reader.redis.run([("XTRIM", f"ww:{{{namespace}:0}}:stream", "MAXLEN", 4)])
        proxy.passing.set()
        await eventually(lambda: harness.index.position(A) == ("e1", 40))
        await eventually(lambda: harness.index.keys(A) == prints(*range(40)))
        assert harness.follower.counters.resyncs > before
        await harness.aclose()
        await direct.aclose()


async def test_whoever_writes_redis_can_misroute_only(redis_server: EmbeddedRedis, namespace: str) -> None:
    """False entries, false owners and rubbish of every kind: matches are names of workers, nothing raises or stops."""
    harness = FollowerHarness(redis_server.url, settings_of(namespace))
    await harness.apply(EventBatch(A, "e1", 1, (stored(1, 2),)))
    await harness.apply(EventBatch(B, "e1", 1, (stored(50),)))
    tag = f"ww:{{{namespace}:0}}"
    slot_b = (await harness.reader.status()).workers[B].slot.to_bytes(4, "little")
    redis = harness.reader.redis
    dice = random.Random(1)
    for number in (1, 2):
        buckets = [("HEXISTS", f"{tag}:b:{bucket}", key(number)[:8]) for bucket in range(16)]
        bucket = (await redis.run(buckets)).index(True)
        await redis.run([("HSET", f"{tag}:b:{bucket}", key(number)[:8], slot_b)])
    assert await harness.reader.match(keys(1, 2)) == {B: 2}, "the forged owner is believed: it is a hint"
    forged = [b"", b"\x01", b"\x01S\xff\xff" + bytes(9), b"\x01B\x01\x01" + bytes(8) + b"xe+\xff\xff\xff\xff"]
    forged += [dice.randbytes(dice.randrange(1, 60)) for _ in range(100)]
    await redis.run([("XADD", f"{tag}:stream", "*", "b", payload) for payload in forged])
    await redis.run([("XADD", f"{tag}:stream", "*", "other", "field")])
    await redis.run(
        [("HSET", f"{tag}:workers", "ghost", "not:a:record", "\udcff".encode("utf-8", "surrogateescape"), "1")]
    )
    await redis.run([("HSET", f"{tag}:b:3", b"short", b"odd", b"8 bytes!", b"12345")])
    await redis.run([("ZADD", f"{tag}:dead", 0, "no slot", 0, str(2**40))])
    await redis.run([("HSET", f"{tag}:workers", "giant", f"e:{2**40}:1:1:{2**50}")])
    assert set(await harness.reader.match(keys(1, 2, 50))) <= {A, B}
    assert await harness.reader.keys(B) >= prints(50)
    await Sweeper(harness.reader).sweep_once()
    await harness.apply(EventBatch(A, "e1", 2, (stored(3),)))
    assert await harness.match(keys(1, 2, 3)) == {A: 3}, "the follower went on"
    assert harness.follower.counters.malformed_entries >= 90
    for name in ("workers", "dir", "stream"):
        await redis.run([("DEL", f"{tag}:{name}"), ("SET", f"{tag}:{name}", "of another type")])
    with pytest.raises(RedisUnavailableError):
        await harness.reader.match(keys(1, 2))
    await eventually(lambda: harness.follower.counters.outages == 1)
    assert harness.index.match(keys(1, 2, 3)) == {A: 3}
    await _delete_namespace(redis, namespace)
    await eventually(lambda: harness.index.match(keys(1, 2, 3)) == {A: 3} and harness.follower.is_synced)
    await harness.apply(EventBatch(A, "e1", 3, (stored(4),)))
    assert await harness.match(keys(1, 2, 3, 4)) == {A: 4}, "and heals when the rubbish is gone"
    await harness.aclose()


async def test_redis_sees_fingerprints_and_nothing_more(redis_server: EmbeddedRedis, namespace: str) -> None:
    harness = RedisHarness(redis_server.url, settings_of(namespace))
    numbers = range(40)
    await harness.apply(EventBatch(A, "e1", 1, (stored(*numbers),)))
    everything = b"".join(
        [repr(each).encode() + each for each in await _dump_namespace(harness.reader.redis, namespace)]
    )
    assert all(key(number)[:8] in everything for number in numbers), "the guard can see what is there"
    assert not any(key(number)[8:16] in everything for number in numbers), "the rest of a key never leaves the worker"
    await harness.aclose()


async def _dump_namespace(redis: GuardedRedis, namespace: str) -> list[bytes]:
    contents = []
    for name in await _names(redis, namespace):
        kind = (await redis.run([("TYPE", name)]))[0]
        read = {b"hash": ("HGETALL", name), b"stream": ("XRANGE", name, "-", "+"), b"zset": ("ZRANGE", name, 0, -1)}
        reply = (await redis.run([read.get(kind, ("GET", name))]))[0]
        contents += [name, *_flatten(reply)]
    return contents


def _flatten(reply: object) -> list[bytes]:
    if isinstance(reply, bytes):
        return [reply]
    if isinstance(reply, dict):
        return [piece for pair in reply.items() for each in pair for piece in _flatten(each)]
    if isinstance(reply, list | tuple):
        return [piece for each in reply for piece in _flatten(each)]
    return [str(reply).encode()]


async def _names(redis: GuardedRedis, namespace: str) -> list[bytes]:
    return [name for name in (await redis.run([("KEYS", "*")]))[0] if namespace.encode() in name]


async def _delete_namespace(redis: GuardedRedis, namespace: str) -> None:
    names = await _names(redis, namespace)
    assert names
    # In one go: a renewal a moment later fills it again.
    assert await redis.run([("DEL", *names), ("EXISTS", *names)]) == [len(names), 0]


def test_the_breaker_opens_probes_and_closes() -> None:
    now = [0.0]
    breaker = CircuitBreaker(threshold=2, min_open_s=1.0, max_open_s=4.0, clock=lambda: now[0])
    breaker.failed()
    assert breaker.may_call()
    breaker.failed()
    assert breaker.is_open
    assert not breaker.may_call()
    now[0] = 1.0
    assert breaker.may_call(), "one probe passes"
    assert not breaker.may_call(), "and no second one beside it"
    breaker.failed()
    now[0] = 2.0
    assert not breaker.may_call(), "the circuit stays open for longer after a failed probe"
    now[0] = 3.1
    assert breaker.may_call()
    breaker.succeeded()
    assert breaker.may_call()
    assert not breaker.is_open
