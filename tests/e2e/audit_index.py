"""Does the router's index say what the workers hold? `python audit_index.py GCS_ADDRESS STATE_DIR` prints JSON.

A process of its own, because it joins the cluster's Ray as a driver.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import sys
import time
from functools import reduce
from operator import xor
from pathlib import Path

import grpc
import ray

from cluster.api.channel import METHOD_CONTROL, AuditCache
from cluster.api.secret import channel_token
from cluster.api.stream import pass_of
from cluster.api.worker_state import WorkerInfo
from router.actor import ROUTER_NAMESPACE, router_name

PATIENCE_S = 60.0  # events are on their way for a moment


def digest(prints: frozenset[bytes]) -> int:
    combined = reduce(xor, (int.from_bytes(each, "little") for each in prints), 0)
    return len(prints) << 64 | combined


async def ask(worker: WorkerInfo, token: str) -> int:
    async with grpc.aio.insecure_channel(worker.replica_id) as channel:
        method = channel.unary_unary(METHOD_CONTROL, request_serializer=pickle.dumps)
        answer: int = pickle.loads(await method(AuditCache(), metadata=pass_of(token, worker.epoch), timeout=20))
    return answer


async def compare(router: ray.actor.ActorHandle, token: str) -> dict[str, list[str]]:
    indexed = await router.indexed.remote()
    equal, differing = [], []
    for worker, is_live in await router.members.remote():
        if not is_live:
            continue
        held = await ask(worker, token)
        believed = digest(indexed.get(worker.worker_id, frozenset()))
        line = f"{worker.worker_id}: holds {held >> 64} blocks, index says {believed >> 64}"
        (equal if held == believed else differing).append(line)
    return {"equal": equal, "differing": differing}


async def audit(token: str) -> dict[str, list[str]]:
    router = ray.get_actor(router_name("watchword"), namespace=ROUTER_NAMESPACE)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = await compare(router, token)
        if not found["differing"] or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


def main() -> None:
    address, state_dir = sys.argv[1:]
    token = channel_token((Path(state_dir) / "cluster.api.secret").read_bytes().strip())
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    print(json.dumps(asyncio.run(audit(token))))


if __name__ == "__main__":
    main()
