"""Decisions per second of the plain router: `python -m router.bench_route --workers 64 --blocks 64`."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from hashlib import blake2b
from random import Random

from cache_service.events import BlockStored, EventBatch
from cache_service.prefix_index import InMemoryPrefixIndex
from cluster.api.ids import BlockKey, RequestId, WorkerId
from cluster.api.routing import RouteQuery
from cluster.api.worker_state import WorkerInfo
from router.router import Router

BLOCK_SIZE = 16


def _keys(name: str, count: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(blake2b(f"{name}/{index}".encode(), digest_size=32).digest()) for index in range(count))


def _prompts(num_blocks: int, count: int, random: Random) -> list[tuple[BlockKey, ...]]:
    """Half of every prompt is one of 50 shared prefixes."""
    prefixes = [_keys(f"prefix{number}", num_blocks // 2) for number in range(50)]
    return [random.choice(prefixes) + _keys(f"own{number}", num_blocks - num_blocks // 2) for number in range(count)]


def _router(num_workers: int, prompts: list[tuple[BlockKey, ...]], random: Random) -> Router:
    index = InMemoryPrefixIndex()
    router = Router(index, random=random, clock=lambda: 0.0)  # so that no heartbeats are needed
    for number in range(num_workers):
        worker_id = WorkerId(f"w{number}")
        router.register(WorkerInfo(worker_id, "e", f"r{number}", "m", "n", BLOCK_SIZE, 100_000, 64, 1_000_000))
        held = [key for prompt in random.sample(prompts, min(20, len(prompts))) for key in prompt]
        index.apply(EventBatch(worker_id, "e", 1, (BlockStored(tuple(held)),)))
    return router


async def measure(
    num_workers: int, num_blocks: int, num_decisions: int, num_in_flight: int
) -> tuple[float, list[float]]:
    """CPU seconds in all, and wall seconds of each route + first_token + release, with `num_in_flight` places held."""
    random = Random(1)
    prompts = _prompts(num_blocks, 500, random)
    router = _router(num_workers, prompts, random)
    in_flight: deque[RequestId] = deque()
    durations = []
    cpu_started = time.thread_time()
    for number in range(num_decisions):
        request_id = RequestId(f"r{number}")
        keys = prompts[number % len(prompts)]
        query = RouteQuery(request_id, "m", keys, num_blocks * BLOCK_SIZE, 64, b"tenant", b"user")
        started = time.perf_counter()
        await router.route(query)
        in_flight.append(request_id)
        if len(in_flight) > num_in_flight:
            oldest = in_flight.popleft()
            router.first_token(oldest)
            router.release(oldest)
        durations.append(time.perf_counter() - started)
    return time.thread_time() - cpu_started, durations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=64, help="blocks per prompt")
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=128)
    args = parser.parse_args()
    cpu_s, durations = asyncio.run(measure(args.workers, args.blocks, args.decisions, args.in_flight))
    durations.sort()
    count = len(durations)
    print(
        f"{args.workers} workers, {args.blocks} blocks a prompt, {args.in_flight} in flight: "
        f"{count / cpu_s:,.0f} decisions per CPU second, p50 {1e6 * durations[count // 2]:.0f} us, "
        f"p99 {1e6 * durations[int(count * 0.99)]:.0f} us"
    )


if __name__ == "__main__":
    main()
