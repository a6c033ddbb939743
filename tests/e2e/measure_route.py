"""Prints how long a placement takes through Ray, from the question to the answer, beside other load of its kind.

    python tests/e2e/measure_route.py [--workers 64] [--blocks 64] [--decisions 2000] [--in-flight 8]

The actor is the real one in a process of its own; the caller is on the same machine, as a gateway is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from hashlib import blake2b
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ray

from cluster.api.ids import BlockKey, RequestId, WorkerId
from cluster.api.routing import RouteQuery
from cluster.api.worker_state import WorkerInfo
from router.actor import create_router
from router.settings import RouterSettings

BLOCK_SIZE = 16


def _keys(name: str, count: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(blake2b(f"{name}/{index}".encode(), digest_size=32).digest()) for index in range(count))


async def _register(router: Any, num_workers: int) -> None:
    for number in range(num_workers):
        worker = WorkerInfo(WorkerId(f"w{number}"), "e", f"r{number}", "m", "n", BLOCK_SIZE, 100_000, 64, 1_000_000)
        await router.register.remote(worker)


async def _heartbeats(router: Any, num_workers: int) -> None:
    while True:
        await _register(router, num_workers)
        await asyncio.sleep(1.0)


async def measure(router: Any, num_workers: int, num_blocks: int, num_decisions: int, in_flight: int) -> list[float]:
    durations: list[float] = []
    await _register(router, num_workers)
    beating = asyncio.create_task(_heartbeats(router, num_workers))
    prompts = [_keys(f"prompt{number}", num_blocks) for number in range(200)]
    numbers = iter(range(num_decisions))

    async def caller() -> None:
        for number in numbers:
            request_id = RequestId(f"r{number}")
            keys = prompts[number % len(prompts)]
            query = RouteQuery(request_id, "m", keys, num_blocks * BLOCK_SIZE, 64, b"tenant", b"user")
            started = time.perf_counter()
            decision = await router.route.remote(query)
            durations.append(time.perf_counter() - started)
            router.notes.remote([("release", (request_id, decision.worker_id))])
            await asyncio.sleep(0.005)

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    beating.cancel()
    return durations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=64, help="blocks per prompt")
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--in-flight", type=int, default=1, help="callers, each with a pause of 5 ms between questions")
    args = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _node_ip_address="127.0.0.1")
    try:
        router = create_router("measure", RouterSettings(index_namespace="measure"))
        durations = asyncio.run(measure(router, args.workers, args.blocks, args.decisions, args.in_flight))
    finally:
        ray.shutdown()
    cuts = quantiles(durations[len(durations) // 10 :], n=100)  # without the first tenth: connections are being made
    figures = {f"p{part}_ms": round(cuts[part - 1] * 1e3, 2) for part in (10, 50, 95)}
    print(json.dumps(vars(args) | figures))


if __name__ == "__main__":
    main()
