"""What is done to a loaded cluster. Each returns when the load has ended and been judged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable

import aiohttp
import psutil
from chaos_load import MODEL, PATIENCE_S, Behaviour, Load, faults_of, wait_for
from chaos_rig import ChaosRig
from observer import GATEWAY, ROUTER, WORKER
from tcp_proxy import TcpProxy

CONCURRENCY = 24
MIN_STREAMING = 4  # a fault is planted while at least so many streams run
MAX_ATTEMPTS = 5  # to hit something: a machine that stands still at the wrong moment has nothing left to hit


async def harm(
    rig: ChaosRig,
    name: str,
    num_requests: int,
    inject: Callable[[Load], Awaitable[float]],
    num_times: int = 1,
) -> None:
    """Runs the load and `inject`s, evenly spread over it; the sum of what that returns are the hits."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        load = rig.load()
        running = asyncio.create_task(load.run(rig.questions, num_requests, CONCURRENCY))
        hits = 0.0
        for turn in range(num_times):
            if await _comes_to(load, running, (turn + 0.25) / num_times):
                hits += await inject(load)
        outcomes = await running
        if hits or faults_of(outcomes) or attempt == MAX_ATTEMPTS:
            rig.judge(name, outcomes, hits)
        await rig.check_aftermath()
        if hits:
            return


async def _comes_to(load: Load, running: asyncio.Task[object], share: float) -> bool:
    """Whether that share of the load ends while enough streams run for a fault to hit one."""
    while load.share_ended < share or len(load.streaming) < MIN_STREAMING:
        if running.done():
            return False
        await asyncio.sleep(0.005)
    return True


async def kill_worker(rig: ChaosRig, num_requests: int, num_times: int = 2) -> None:
    """Hits: requests that the router placed anew because their worker was lost."""

    async def inject(load: Load) -> float:
        before = await asyncio.to_thread(rig.metrics)
        processes = rig.processes(WORKER)
        os.kill(processes[0].pid, signal.SIGKILL)
        await wait_for(lambda: not processes[0].is_running(), 10, "the death of a worker")
        await asyncio.sleep(2.0)
        await wait_for(lambda: len(rig.processes(WORKER)) == rig.num_workers and rig.is_whole(), 120, "a new worker")
        after = await asyncio.to_thread(rig.metrics)
        return after.router("retries") - before.router("retries")

    await harm(rig, "kill -9 a worker", num_requests, inject, num_times)


async def kill_router(rig: ChaosRig, num_requests: int, num_times: int = 3) -> None:
    """Hits: requests that were streaming or waiting when the router died."""
    back_s = []

    async def inject(load: Load) -> float:
        (router,) = rig.processes(ROUTER)
        num_streaming = len(load.streaming)
        os.kill(router.pid, signal.SIGKILL)
        killed = time.monotonic()
        await asyncio.sleep(0.3)
        await wait_for(rig.is_whole, 60, "the router's return")
        back_s.append(time.monotonic() - killed)
        return num_streaming

    await harm(rig, "kill -9 the router", num_requests, inject, num_times)
    rig.report.append(f"  router back with all workers after {[round(each, 1) for each in back_s]} s")


async def hang_router(rig: ChaosRig, num_requests: int) -> None:
    """The actor stops for 8 s without dying. Hits: gateways that placed requests alone, of those seen."""

    async def inject(load: Load) -> float:
        before = await asyncio.to_thread(_local_routes, rig)
        (router,) = rig.processes(ROUTER)
        router.suspend()
        num_ended = load.share_ended
        try:
            await asyncio.sleep(8)
            assert load.share_ended > num_ended, "nobody was answered while the router hung"
        finally:
            router.resume()
        return len(await asyncio.to_thread(_local_routes, rig) - before)

    await harm(rig, "the router hangs for 8 s", num_requests, inject)


def _local_routes(rig: ChaosRig) -> set[float]:
    """What gateways have placed alone, each, as far as they answer: whichever takes the connection."""
    return {rig.metrics().sum("watchword_local_routes_total") for _ in range(16)}


async def kill_redis(rig: ChaosRig, num_requests: int, find: Callable[[], int], num_times: int = 2) -> None:
    """Hits: streams that ran when Redis died. `find` gives its process id."""

    async def inject(load: Load) -> float:
        num_streaming = len(load.streaming)
        os.kill(find(), signal.SIGKILL)
        await asyncio.sleep(1)
        return num_streaming

    await harm(rig, "kill -9 Redis", num_requests, inject, num_times)


async def kill_gateway(rig: ChaosRig, num_requests: int, num_times: int = 2) -> None:
    """Hits: answers that broke off at the client. What they had said until then must have been right."""
    load_of: list[Load] = []

    async def inject(load: Load) -> float:
        load_of.append(load)
        gateways = rig.processes(GATEWAY)
        os.kill(gateways[0].pid, signal.SIGKILL)
        await asyncio.sleep(1)
        await wait_for(lambda: len(rig.processes(GATEWAY)) == len(gateways) and rig.is_whole(), 120, "a new gateway")
        return sum(outcome.end == "broken" and bool(outcome.text) for outcome in load.outcomes)

    await harm(rig, "kill -9 a gateway", num_requests, inject, num_times)


async def slow_redis(rig: ChaosRig, num_requests: int, proxy: TcpProxy, delay_s: float) -> None:
    """Hits: requests that ended while Redis was slow."""

    async def inject(load: Load) -> float:
        ended = load.share_ended
        proxy.delay_s = delay_s
        await asyncio.sleep(max(6.0, 2 * delay_s))
        if load.share_ended < 1.0:
            await wait_for(lambda: load.share_ended > ended, PATIENCE_S, "an answer while Redis was slow")
        hits = (load.share_ended - ended) * num_requests
        proxy.delay_s = 0.0
        return hits

    await harm(rig, f"Redis {delay_s:g} s away", num_requests, inject)


async def disconnects(rig: ChaosRig, num_requests: int) -> None:
    """Hits: streams that their client left after some tokens."""
    load = rig.load()
    outcomes = await load.run(rig.questions, num_requests, CONCURRENCY, Behaviour(leave_share=0.3))
    rig.judge("30 % disconnect", outcomes, sum(outcome.end == "left" for outcome in outcomes))
    await rig.check_aftermath()


async def id_reuse(rig: ChaosRig, num_requests: int) -> None:
    """Everybody sends the same X-Request-ID. Hits: requests that had it while others had it too."""
    load = rig.load()
    outcomes = await load.run(rig.questions, num_requests, CONCURRENCY, Behaviour(request_id="the-same-for-all"))
    own = {outcome.server_id for outcome in outcomes}
    assert len(own) == num_requests, "requests shared the server's own id"
    rig.judge("id reuse", outcomes, num_requests)
    await rig.check_aftermath()


async def full_queue(rig: ChaosRig, num_requests: int) -> None:
    """All at once, more than the queue holds. Hits: those turned away, each told when to come again."""
    load = rig.load()
    outcomes = await load.run(rig.questions, num_requests, concurrency=num_requests)
    refused = [outcome for outcome in outcomes if outcome.code == "overloaded"]
    assert all(outcome.retry_after and int(outcome.retry_after) >= 1 for outcome in refused)
    rig.judge("full queue", outcomes, len(refused))
    await rig.check_aftermath()


async def slow_readers(rig: ChaosRig, num_requests: int, num_slow: int = 4, stall_s: float = 15.0) -> None:
    """Readers with large answers who stop reading, beside others. Hits: readers stalled before their end.

    The others are answered meanwhile, the gateways' memory stays bounded, and the stalled ones get all in the end.
    """
    before = _memory(rig)
    stalled = [asyncio.create_task(_read_late(rig, stall_s)) for _ in range(num_slow)]
    load = rig.load()
    running = asyncio.create_task(load.run(rig.questions, num_requests, CONCURRENCY))
    outcomes = await running
    late = await asyncio.gather(*stalled)
    growth = _memory(rig) - before
    assert growth < 200 << 20, f"gateways grew by {growth >> 20} MiB"
    assert all(is_whole for is_whole, _ in late), "a slow reader did not get its whole answer"
    rig.judge("slow readers", outcomes, sum(num_bytes > 0 for _, num_bytes in late), f"memory +{growth >> 20} MiB")
    await rig.check_aftermath()


async def _read_late(rig: ChaosRig, stall_s: float) -> tuple[bool, int]:
    """(whether the answer was whole, bytes that waited while nobody read)"""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{uuid.uuid4().hex} Tell me everything."}],
        "max_tokens": 150,
        "n": 2,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
        "user": uuid.uuid4().hex,
    }
    headers = {"Authorization": f"Bearer {rig.delegate}"}
    timeout = aiohttp.ClientTimeout(total=240)
    async with (
        aiohttp.ClientSession(timeout=timeout, read_bufsize=1024) as session,
        session.post(f"{rig.server.url}/v1/chat/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        await response.content.readline()
        await asyncio.sleep(stall_s)
        rest = await response.content.read()
    return rest.rstrip().endswith(b"[DONE]"), len(rest)


def _memory(rig: ChaosRig) -> int:
    total = 0
    for process in rig.processes(GATEWAY):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total
