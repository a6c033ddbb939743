"""Measures the prefix index: `python -m cache_service.bench_index --blocks 1000000 --json FILE`.

Bytes per block and lookup times, in process and in an embedded Redis, at 1.6 owners per block. Prompts of 64 blocks are
drawn from what one worker holds, so that every lookup walks all 64.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from cache_service.embedded import EmbeddedRedis
from cache_service.event_codec import SnapshotStored
from cache_service.events import BlockRemoved, BlockStored, EventBatch, Snapshot
from cache_service.fingerprints import unpack
from cache_service.index_follower import IndexFollower
from cache_service.prefix_index import InMemoryPrefixIndex
from cache_service.redis_client import GuardedRedis, RedisLimits
from cache_service.redis_index import IndexSettings, RedisIndex, now_ms
from cluster.api.ids import BlockKey, WorkerId

OWNER_SHARES = (0.55, 0.30, 0.15)  # of blocks with one, two, three owners: 1.6 on average
PROMPT_BLOCKS = 64
EPOCH = "e1"

Contents = dict[WorkerId, tuple[BlockKey, ...]]
Prompts = list[tuple[BlockKey, ...]]


def make_contents(num_blocks: int, num_workers: int, seed: int = 0) -> Contents:
    dice = np.random.default_rng(seed)
    prints = dice.integers(1, 2**64, num_blocks, dtype=np.uint64)
    num_owners = dice.choice([1, 2, 3], num_blocks, p=OWNER_SHARES)
    first = dice.integers(0, num_workers, num_blocks)
    contents = {}
    for worker in range(num_workers):
        distance = (worker - first) % num_workers
        contents[WorkerId(f"worker-{worker}")] = unpack(prints[distance < num_owners].astype("<u8").tobytes())
    return contents


def make_prompts(contents: Contents, num_prompts: int, seed: int = 1) -> Prompts:
    dice = np.random.default_rng(seed)
    names = list(contents)
    prompts = []
    for _ in range(num_prompts):
        held = contents[names[dice.integers(len(names))]]
        prompts.append(tuple(held[at] for at in dice.integers(0, len(held), PROMPT_BLOCKS)))
    return prompts


def percentiles(samples_s: list[float]) -> dict[str, float]:
    """In microseconds. On a busy machine the tenth percentile is what the code itself takes."""
    quantiles = (10, 50, 90, 99)
    values = np.percentile(np.array(samples_s) * 1e6, quantiles)
    return {f"p{quantile}_us": round(float(value), 1) for quantile, value in zip(quantiles, values, strict=True)}


def time_each(call: Callable[[tuple[BlockKey, ...]], Any], prompts: Prompts) -> dict[str, float]:
    samples = []
    for prompt in prompts:
        begin = time.perf_counter()
        call(prompt)
        samples.append(time.perf_counter() - begin)
    return percentiles(samples)


def bench_memory(contents: Contents, prompts: Prompts) -> dict[str, Any]:
    index = InMemoryPrefixIndex()
    begin = time.perf_counter()
    for worker_id, keys in contents.items():
        index.apply_snapshot(Snapshot(worker_id, EPOCH, 0, keys))
    load_s = time.perf_counter() - begin
    lookup_hit = time_each(index.match, prompts)
    absent = make_prompts({WorkerId("none"): unpack(np.random.default_rng(9).bytes(8 * 100_000))}, 2000)
    batches = _small_batches(prompts, WorkerId("worker-0"), 0)
    begin = time.perf_counter()
    for batch in batches:
        index.apply(batch)
    apply_s = time.perf_counter() - begin
    return {
        "blocks": index.num_blocks,
        "bytes_per_block": round(index.num_bytes / index.num_blocks, 1),
        "load_s": round(load_s, 2),
        "lookup_hit": lookup_hit,
        "lookup_miss": time_each(index.match, absent),
        "apply_batch_us": round(apply_s / len(batches) * 1e6, 1),
    }


def bench_dict(contents: Contents, prompts: Prompts) -> dict[str, Any]:
    """The layout that was not taken: a dictionary from fingerprint to owner set."""
    table: dict[int, int] = {}
    for bit, keys in enumerate(contents.values()):
        for key in keys:
            print_ = int.from_bytes(key, "little")
            table[print_] = table.get(print_, 0) | 1 << bit

    def lookup(prompt: tuple[BlockKey, ...]) -> int:
        alive = -1
        for print_ in np.frombuffer(b"".join(prompt), dtype="<u8").tolist():
            alive &= table.get(print_, 0)
        return alive

    num_bytes = table.__sizeof__() + 32 * len(table)
    return {"bytes_per_block": round(num_bytes / len(table), 1), "lookup_hit": time_each(lookup, prompts)}


async def bench_redis(url: str, contents: Contents, prompts: Prompts, num_shards: int) -> dict[str, Any]:
    settings = IndexSettings("bench", num_shards=num_shards, lease_s=3600)
    index = RedisIndex(GuardedRedis(url, RedisLimits(deadline_s=30, slow_deadline_s=60)), settings)
    num_blocks = len(set().union(*contents.values()))
    before = await _used_memory(index)
    begin = time.perf_counter()
    slots = {}
    for worker_id, keys in contents.items():
        slots[worker_id] = await index.claim(worker_id, EPOCH, now_ms())
        await index.fill(slots[worker_id], keys)
        await index.commit(slots[worker_id], now_ms(), SnapshotStored(worker_id, EPOCH, 0))
    load_s = time.perf_counter() - begin
    used = await _used_memory(index) - before
    result = {
        "shards": num_shards,
        "bytes_per_block": round(used / num_blocks, 1),
        "load_s": round(load_s, 2),
        "lookup_hit": await _time_lookups(index, prompts),
        "lookup_16_at_once": await _time_concurrent(index, prompts, 16),
        "bootstrap_s": await _bootstrap_s(url, settings),
        "publish_batch_us": await _time_batches(index, slots, prompts),
    }
    await index.redis.aclose()
    return result


async def _used_memory(index: RedisIndex) -> int:
    reply = (await index.redis.run([("INFO", "memory")]))[0]
    if isinstance(reply, dict):
        return int(reply["used_memory"])
    return int(reply.split(b"used_memory:")[1].split()[0])


async def _time_lookups(index: RedisIndex, prompts: Prompts) -> dict[str, float]:
    samples = []
    for prompt in prompts[:2000]:
        begin = time.perf_counter()
        matched = await index.match(prompt)
        samples.append(time.perf_counter() - begin)
        assert max(matched.values()) == PROMPT_BLOCKS, matched
    return percentiles(samples)


async def _time_concurrent(index: RedisIndex, prompts: Prompts, num_callers: int) -> dict[str, float]:
    samples: list[float] = []

    async def caller(mine: Prompts) -> None:
        for prompt in mine:
            begin = time.perf_counter()
            await index.match(prompt)
            samples.append(time.perf_counter() - begin)

    await asyncio.gather(*(caller(prompts[start:2000:num_callers]) for start in range(num_callers)))
    return percentiles(samples)


async def _bootstrap_s(url: str, settings: IndexSettings) -> float:
    """From an empty follower to one that is in step with all that stands in Redis."""
    memory = InMemoryPrefixIndex()
    follower = IndexFollower(url, settings, memory, limits=RedisLimits(slow_deadline_s=60))
    begin = time.perf_counter()
    task = asyncio.create_task(follower.run())
    await follower.wait_synced()
    elapsed = time.perf_counter() - begin
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await follower.aclose()
    return round(elapsed, 2)


async def _time_batches(index: RedisIndex, slots: dict[WorkerId, int], prompts: Prompts) -> float:
    worker_id = next(iter(slots))
    batches = _small_batches(prompts, worker_id, 0)
    begin = time.perf_counter()
    for batch in batches:
        await index.advance(worker_id, EPOCH, slots[worker_id], batch.sequence - 1, [batch])
    return round((time.perf_counter() - begin) / len(batches) * 1e6, 1)


def _small_batches(prompts: Prompts, worker_id: WorkerId, sequence: int) -> list[EventBatch]:
    """Each stores eight blocks and removes eight, as a worker at work does between two steps."""
    return [
        EventBatch(worker_id, EPOCH, sequence + number, (BlockStored(prompt[:8]), BlockRemoved(prompt[8:16])))
        for number, prompt in enumerate(prompts[:1000], 1)
    ]


def _with_server(bench: Callable[[str], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    server = EmbeddedRedis(max_memory_mb=16 * 1024, supervise=False)
    server.start()
    try:
        return asyncio.run(bench(server.url))
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--no-dict", action="store_true", help="leave out the dictionary, for want of memory")
    parser.add_argument("--no-redis", action="store_true", help="measure in process only")
    arguments = parser.parse_args()
    contents = make_contents(arguments.blocks, arguments.workers)
    prompts = make_prompts(contents, 3000)
    gc.freeze()
    figures: dict[str, Any] = {
        "blocks": arguments.blocks,
        "workers": arguments.workers,
        "load_average": os.getloadavg()[0],
    }
    figures["in_process"] = bench_memory(contents, prompts)
    if not arguments.no_dict:
        figures["dictionary"] = bench_dict(contents, prompts)
    if not arguments.no_redis:
        figures["redis"] = _with_server(lambda url: bench_redis(url, contents, prompts, arguments.shards))
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
