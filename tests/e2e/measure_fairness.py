"""Time to first token of a small tenant, alone and beside a tenant that floods the cluster.

    python tests/e2e/measure_fairness.py URL SMALL_KEY FLOOD_KEY [--probes 40] [--flood 24]

The two are measured in turn, so that a machine whose speed drifts drifts for both. The keys are of two tenants.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from contextlib import asynccontextmanager
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import aiohttp
from chaos_load import MODEL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NUM_ROUNDS = 4


def _body(words: int, max_tokens: int) -> dict[str, Any]:
    text = f"{uuid.uuid4().hex} " + " ".join(f"fact {number}: the river is long." for number in range(words // 6))
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}


async def _first_token_s(session: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]) -> float:
    """Reads to the end; the seconds until the first token."""
    started = time.perf_counter()
    first = 0.0
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if (
                not first
                and b'"content":"' in line.replace(b" ", b"")
                and b'"content":""' not in line.replace(b" ", b"")
            ):
                first = time.perf_counter() - started
    return first


@asynccontextmanager
async def _flood(session: aiohttp.ClientSession, url: str, key: str, num_clients: int) -> AsyncIterator[None]:
    async def client() -> None:
        while True:
            await _first_token_s(session, url, key, _body(240, 100))

    clients = [asyncio.create_task(client()) for _ in range(num_clients)]
    await asyncio.sleep(8)  # until it has filled the cluster
    try:
        yield
        for task in clients:
            if task.done():
                task.result()  # raises what ended it
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def _probe(session: aiohttp.ClientSession, url: str, key: str, count: int) -> list[float]:
    durations = []
    for _ in range(count):
        durations.append(await _first_token_s(session, url, key, _body(60, 4)))
        await asyncio.sleep(0.2)
    return durations


async def measure(url: str, small_key: str, flood_key: str, num_probes: int, num_flooding: int) -> dict[str, float]:
    """Percentiles in seconds, and the ratio of the 95th."""
    connector = aiohttp.TCPConnector(limit=0)
    alone: list[float] = []
    flooded: list[float] = []
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        await _probe(session, url, small_key, 3)
        for _ in range(NUM_ROUNDS):
            alone += await _probe(session, url, small_key, num_probes // NUM_ROUNDS)
            async with _flood(session, url, flood_key, num_flooding):
                flooded += await _probe(session, url, small_key, num_probes // NUM_ROUNDS)
            await asyncio.sleep(2)
    alone_p95, flooded_p95 = quantiles(alone, n=20)[-1], quantiles(flooded, n=20)[-1]
    return {
        "alone_p50_s": round(median(alone), 3),
        "alone_p95_s": round(alone_p95, 3),
        "flooded_p50_s": round(median(flooded), 3),
        "flooded_p95_s": round(flooded_p95, 3),
        "p50_ratio": round(median(flooded) / median(alone), 2),
        "p95_ratio": round(flooded_p95 / alone_p95, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("small_key")
    parser.add_argument("flood_key")
    parser.add_argument("--probes", type=int, default=40)
    parser.add_argument("--flood", type=int, default=24, help="requests of the flooding tenant at a time")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.url, args.small_key, args.flood_key, args.probes, args.flood))))


if __name__ == "__main__":
    main()
