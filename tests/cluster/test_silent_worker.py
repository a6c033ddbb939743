"""A worker whose connection stays open and who says nothing any more, as behind a cut network."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from multiprocessing.queues import Queue

import pytest
from dispatch_rig import TOKEN, ScriptedEngine, _no_control, eventually, make_request

from cluster.api.errors import WorkerLostError
from cluster.worker_client import WorkerClient
from workers.channel import WorkerChannel


def serve(address: Queue[str]) -> None:
    async def main() -> None:
        engine = ScriptedEngine(pause_s=0.05)
        engine.channel = WorkerChannel(engine, _no_control, TOKEN, "epoch", "127.0.0.1")
        address.put(await engine.channel.start())
        await asyncio.sleep(300)

    asyncio.run(main())


async def test_a_silent_worker_is_lost_within_seconds() -> None:
    context = multiprocessing.get_context("spawn")
    address = context.Queue()
    process = context.Process(target=serve, args=(address,), daemon=True)
    process.start()
    assert process.pid is not None
    client = WorkerClient(await asyncio.to_thread(address.get, True, 200), TOKEN, "epoch")
    num_outputs = 0

    async def read() -> None:
        nonlocal num_outputs
        async for _ in client.stream(make_request(max_tokens=5000)):
            num_outputs += 1

    reading = asyncio.create_task(read())
    try:
        await eventually(lambda: num_outputs > 5)
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(reading, 30)
        assert time.monotonic() - started < 15
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        await client.close()
