"""Prints how long a placement takes from a gateway's question to the router's answer, beside other load of its kind.

    python tests/e2e/measure_route.py [--workers 64] [--blocks 64] [--decisions 2000] [--in-flight 1]

The router is the real actor in a process of its own, the question goes the way of a gateway's, and the workers' hearts
beat in a third process, each twice a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from statistics import quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ray

from cluster.api.ids import BlockKey, RequestId, WorkerId
from cluster.api.routing import RouteQuery
from cluster.api.secret import channel_token, load_or_create_secret
from cluster.api.worker_state import WorkerInfo, WorkerSnapshot
from cluster.remote_router import RemoteRouter
from router.actor import create_router, find_router
from router.settings import RouterSettings

APP, BLOCK_SIZE, MAX_NUM_SEQS = "measure", 16, 64
HEARTBEAT_PERIOD_S = 0.5


class Hearts:
    """The heartbeats of all workers, spread evenly over their period."""

    async def beat_forever(self, num_workers: int) -> None:
        router = find_router(APP)
        started, number = time.monotonic(), 0
        while True:
            name = f"w{number % num_workers}"
            snapshot = WorkerSnapshot(WorkerId(name), "e", 0, 0, 0, 100_000, 1000.0, 0.01, ())
            if (await router.report.remote(snapshot))["register"]:
                info = WorkerInfo(
                    WorkerId(name), "e", f"r-{name}", "m", "n", BLOCK_SIZE, 100_000, MAX_NUM_SEQS, 1_000_000
                )
                await router.register.remote(info)
            number += 1
            await asyncio.sleep(started + number * HEARTBEAT_PERIOD_S / num_workers - time.monotonic())


def _keys(name: str, count: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(blake2b(f"{name}/{index}".encode(), digest_size=32).digest()) for index in range(count))


async def measure(token: str, num_workers: int, num_blocks: int, num_decisions: int, in_flight: int) -> list[float]:
    durations: list[float] = []
    router = RemoteRouter(APP, token)
    router.start()
    async with asyncio.timeout(60):
        while router.num_workers < num_workers:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    prompts = [_keys(f"prompt{number}", num_blocks) for number in range(200)]
    numbers = iter(range(num_decisions))

    async def caller() -> None:
        for number in numbers:
            request_id = RequestId(f"r{number}")
            keys = prompts[number % len(prompts)]
            query = RouteQuery(request_id, "m", keys, num_blocks * BLOCK_SIZE, 64, b"tenant", b"user")
            started = time.perf_counter()
            decision = await router.route(query)
            durations.append(time.perf_counter() - started)
            router.release(request_id, decision.worker_id)
            await asyncio.sleep(0.005)

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    assert router.num_local_routes == 0, "the router was not asked"
    await router.stop()
    return durations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=64, help="blocks per prompt")
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--in-flight", type=int, default=1, help="callers, each with a pause of 5 ms between questions")
    args = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _node_ip_address="127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        secret_file = Path(folder) / "secret"
        token = channel_token(load_or_create_secret(secret_file))
        try:
            create_router(APP, RouterSettings(index_namespace=APP, secret_file=secret_file))
            hearts = ray.remote(Hearts).options(num_cpus=0).remote()
            hearts.beat_forever.remote(args.workers)
            durations = asyncio.run(measure(token, args.workers, args.blocks, args.decisions, args.in_flight))
        finally:
            ray.shutdown()
    cuts = quantiles(durations[len(durations) // 10 :], n=100)  # without the first tenth: connections are being made
    figures = {f"p{part}_ms": round(cuts[part - 1] * 1e3, 2) for part in (10, 50, 95)}
    print(json.dumps(vars(args) | figures))


if __name__ == "__main__":
    main()
