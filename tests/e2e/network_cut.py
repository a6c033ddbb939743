"""A node is cut off from the network while requests run, briefly and for long; another one is killed:
`python tests/e2e/network_cut.py`, as root.

Three machines (network namespaces) with a Ray node each: the head with gateway, router and Redis, two with an engine.
Prints a JSON line for each fault. The clients are on the head.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from audit_index import audit
from chaos_load import Load, Outcome, Question, answer_alone, ends_of, faults_of, make_questions, reach, wait_for
from machines import HEAD, PORTS, URL, Machines
from namespaces import Lan
from observer import GATEWAY, ROUTER, WORKER, Observer, num_client_connections

from cluster.api.secret import channel_token
from cluster.api.worker_state import WorkerInfo
from router.actor import find_router

EAST, WEST = "east", "west"
NUM_REQUESTS, CONCURRENCY = 500, 24
BLINK_S, SHORT_CUT_S, SILENT_CUT_S, LONG_CUT_S = 3.0, 8.0, 20.0, 60.0  # streams are given up after 5 to 10 s
SAMPLE_PERIOD_S = 0.2


@dataclass
class Sight:
    """What was seen of one worker since the fault, in seconds after it."""

    unheard_s: float | None = None  # the router places nothing there any more
    first_moved_s: float | None = None
    last_moved_s: float | None = None
    dead_to_ray_s: float | None = None
    moved: float = 0.0


@dataclass
class Site:
    machines: Machines
    observer: Observer
    questions: list[Question] = field(default_factory=list)
    free_blocks: float = 0.0

    async def members(self) -> dict[str, tuple[WorkerInfo, bool]]:
        """By machine: the worker that the router knows there, the live one if there are several."""
        members = await find_router("watchword").members.remote()
        by_address = {info.replica_id.rpartition(":")[0]: (info, live) for info, live in sorted(members, key=_is_live)}
        return {name: by_address[a] for name, a in self.machines.lan.addresses.items() if a in by_address}

    async def worker_on(self, machine: str) -> WorkerInfo:
        return (await self.members())[machine][0]

    async def is_heard(self, machine: str) -> bool:
        return (await self.members()).get(machine, (None, False))[1]

    def gateways(self) -> list[psutil.Process]:
        return self.machines.processes(HEAD, GATEWAY)

    def what_is_left(self) -> str:
        left = self.observer.metrics().what_is_left(self.free_blocks)
        num_clients = num_client_connections(self.gateways(), PORTS)
        if num_clients > 1:  # this scrape's own may be seen
            left.append(f"{num_clients} client connections")
        return ", ".join(left)

    async def num_channels(self) -> int:
        """Connections of gateways to engines. One to each is kept open."""
        peers = {info.replica_id for info, _ in (await self.members()).values()}
        found = 0
        for gateway in self.gateways():
            found += sum(
                _peer(c) in peers for c in gateway.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED
            )
        return found


def _peer(connection: Any) -> str:
    """Address and port of the other end; sockets for both families show IPv4 as a part of IPv6."""
    return f"{connection.raddr.ip.removeprefix('::ffff:')}:{connection.raddr.port}" if connection.raddr else ""


def _is_live(member: tuple[WorkerInfo, bool]) -> bool:
    return member[1]


async def harm(site: Site, name: str, machine: str, inject: Callable[[Sight], Awaitable[dict[str, Any]]]) -> None:
    """Runs the load, does `inject` while streams run on that machine, then looks at what it left."""
    load = Load(URL, "")
    worker = await site.worker_on(machine)
    is_over = asyncio.Event()
    running = asyncio.create_task(_ask_until(is_over, site, load))
    await reach(load, 0.1, 6)
    while (hits := _streaming_on(load, worker)) < 2:
        assert not running.done(), "the load ended before the fault could be planted"
        await asyncio.sleep(0.01)
    sight = Sight()
    watching = asyncio.create_task(_watch(site, machine, sight))
    try:
        found = await inject(sight)
        is_over.set()
        outcomes = await running
        found |= await aftermath(site, machine)
        found["same_life"] = (await site.worker_on(machine)).epoch == worker.epoch
    finally:
        watching.cancel()
    line = {
        "fault": name,
        "requests": len(outcomes),
        "hits": hits,
        "ends": ends_of(outcomes),
        "faults": faults_of(outcomes)[:5],
        **{key: round(value, 1) for key, value in vars(sight).items() if value is not None},
        **found,
    }
    print(json.dumps(line), flush=True)


async def _ask_until(is_over: asyncio.Event, site: Site, load: Load) -> list[Outcome]:
    """All that `load` is to ask, and more until the fault is over."""
    outcomes = await load.run(site.questions, NUM_REQUESTS, CONCURRENCY)
    while not is_over.is_set():
        outcomes = outcomes + await Load(URL, "").run(site.questions, 4 * CONCURRENCY, CONCURRENCY)
    return outcomes


def _streaming_on(load: Load, worker: WorkerInfo) -> int:
    return sum(load.outcomes[number].worker == worker.worker_id for number in load.streaming)


async def _watch(site: Site, machine: str, sight: Sight) -> None:
    started = time.monotonic()
    retries = await asyncio.to_thread(site.observer.num_retries)
    while True:
        is_heard = await site.is_heard(machine)
        moved = await asyncio.to_thread(site.observer.num_retries) - retries
        is_alive = await asyncio.to_thread(site.machines.is_alive_to_ray, machine)
        now_s = time.monotonic() - started
        if not is_heard and sight.unheard_s is None:
            sight.unheard_s = now_s
        if moved > sight.moved:
            sight.first_moved_s = sight.first_moved_s or now_s
            sight.last_moved_s, sight.moved = now_s, moved
        if not is_alive and sight.dead_to_ray_s is None:
            sight.dead_to_ray_s = now_s
        await asyncio.sleep(SAMPLE_PERIOD_S)


async def aftermath(site: Site, machine: str) -> dict[str, Any]:
    """Both workers take work, nothing is left behind, the index says what the workers hold."""
    num_workers = len(site.machines.engines)
    await wait_for(lambda: site.observer.num_workers() == num_workers, 180, "both workers taking work")
    try:
        await wait_for(lambda: not site.what_is_left(), 30, "an empty cluster")
        left = ""
    except AssertionError:
        left = site.what_is_left()
    worker = await site.worker_on(machine)
    outcomes = await Load(URL, "").run(site.questions, 4 * len(site.questions), CONCURRENCY)
    await wait_for(lambda: not site.what_is_left(), 30, "an empty cluster once more")
    audited = await audit(channel_token(site.machines.secret))
    return {
        "left": left,
        "index_differs": audited["differing"],
        "index_equals": audited["equal"],
        "channels": await site.num_channels(),
        "taken_afterwards": sum(outcome.worker == worker.worker_id for outcome in outcomes),
        "faults_afterwards": faults_of(outcomes)[:5],
    }


async def short_cut(site: Site, name: str, machine: str, cut: Callable[[str], None], cut_s: float) -> None:
    """The node comes back before Ray has given it up."""

    async def inject(_: Sight) -> dict[str, Any]:
        cut(machine)
        await asyncio.sleep(cut_s)
        site.machines.lan.plug(machine)
        plugged = time.monotonic()
        await _until(lambda: site.is_heard(machine), 60, "a heartbeat after the cut")
        return {"cut_s": cut_s, "back_after_plug_s": round(time.monotonic() - plugged, 1)}

    await harm(site, name, machine, inject)


async def long_cut(site: Site, machine: str) -> None:
    """Ray gives the node up; when its cable is back, what runs there ends, and it joins again as a new node."""

    async def inject(_: Sight) -> dict[str, Any]:
        before = await site.worker_on(machine)
        site.machines.lan.unplug(machine)
        await asyncio.sleep(LONG_CUT_S)
        num_cut_off = len(site.machines.processes(machine, WORKER))
        site.machines.lan.plug(machine)
        plugged = time.monotonic()
        await wait_for(lambda: not site.machines.lan.pids(machine), 90, "the end of what ran on the lost node")
        gone_s = time.monotonic() - plugged
        joined_s = await _join_again(site, machine, before)
        return {
            "cut_s": LONG_CUT_S,
            "workers_cut_off": num_cut_off,
            "gone_after_plug_s": round(gone_s, 1),
            "joined_again_s": joined_s,
        }

    await harm(site, "given up by Ray", machine, inject)


async def kill(site: Site, machine: str) -> None:
    """Everything on the node dies at once."""

    async def inject(sight: Sight) -> dict[str, Any]:
        before = await site.worker_on(machine)
        site.machines.lan.kill(machine)
        await wait_for(lambda: sight.dead_to_ray_s is not None, 90, "Ray's notice of the death")
        return {"joined_again_s": await _join_again(site, machine, before)}

    await harm(site, "killed", machine, inject)


async def _join_again(site: Site, machine: str, before: WorkerInfo) -> float:
    """Seconds until a worker of a new life takes work there."""
    site.machines.start_engine(machine)
    started = time.monotonic()

    async def is_new() -> bool:
        info, is_live = (await site.members()).get(machine, (before, False))
        return is_live and info.epoch != before.epoch

    await _until(is_new, 180, "a new worker on the node that came back")
    return round(time.monotonic() - started, 1)


async def _until(condition: Callable[[], Awaitable[bool]], timeout_s: float, what: str) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen within {timeout_s} s") from None


async def run(machines: Machines) -> None:
    site = Site(machines, Observer(URL))
    await wait_for(lambda: site.observer.num_workers() == len(machines.engines), 240, "ready workers")
    assert machines.processes(HEAD, ROUTER), "the router is not beside the gateway that made it"
    site.questions = await answer_alone(URL, "", make_questions(16))
    site.free_blocks = max(site.observer.metrics().values("watchword_kv_blocks_free").values())
    lan = machines.lan
    await short_cut(site, "its cable out for a moment", EAST, lan.unplug, BLINK_S)
    await short_cut(site, "its cable out", EAST, lan.unplug, SHORT_CUT_S)
    await short_cut(site, "cut off inside the network", EAST, lan.isolate, SILENT_CUT_S)
    await long_cut(site, EAST)
    await kill(site, WEST)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is taken down
    state_dir = Path(tempfile.mkdtemp(prefix="ww-cut-"))  # short: Ray's sockets are in it
    print(f"logs until all went well: {state_dir}", file=sys.stderr)
    with Lan([HEAD, EAST, WEST]) as lan:
        lan.enter(HEAD)
        machines = Machines(lan, state_dir)
        try:
            machines.start()
            asyncio.run(run(machines))
        finally:
            machines.stop()
    shutil.rmtree(state_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
