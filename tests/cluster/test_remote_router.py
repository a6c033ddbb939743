"""A gateway and its router: in answer, in a queue, hanging, gone, back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray
from dispatch_rig import eventually

from cluster.api.errors import OverloadedError
from cluster.api.ids import RequestId, WorkerId
from cluster.api.router_channel import RouterAddress
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.worker_state import WorkerInfo
from cluster.remote_router import RemoteRouter
from router.channel import RouterChannel

DECISION = RouteDecision(WorkerId("by-router"), "e", "address", "n", 0)
FALLBACK = WorkerId("w0")
TOKEN = "token"
NEVER_S = 3600.0  # what takes this time has no part in the test


def worker() -> WorkerInfo:
    return WorkerInfo(FALLBACK, "e", "address", "m", "n", 16, 100, 8, 1000)


def query(request_id: str = "r") -> RouteQuery:
    return RouteQuery(RequestId(request_id), "m", (), 10, 5, b"t", b"u")


class _Method:
    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._call(*args))


class FakeActor:
    """The router's actor without Ray, its stream a real one; `mode` is what ails it."""

    def __init__(self) -> None:
        self.mode = "well"
        self.hang = asyncio.Event()
        self.queue = asyncio.Event()
        self.queue.set()
        self.noted: list[tuple[str, ...]] = []
        self.num_asked = 0
        self.num_visits = 0
        self.num_withdrawn = 0
        self.known = [(worker(), True)]
        self.error: Exception | None = None
        self.epoch = 0
        self.streams: RouterChannel | None = None
        self.channel, self.members = _Method(self._channel), _Method(self._members)

    def find(self, name: str) -> FakeActor:
        if self.mode == "unknown":
            raise ValueError("no such actor")
        return self

    async def listen(self) -> None:
        self.epoch += 1
        streams = RouterChannel(self, TOKEN, f"life-{self.epoch}", "127.0.0.1")
        self._address = await streams.start()
        self.streams = streams

    async def break_streams(self) -> None:
        if self.streams is not None:
            await self.streams.stop(0)
            self.streams = None

    async def _ail(self) -> None:
        if self.mode == "dead":
            raise ray.exceptions.ActorDiedError()
        if self.mode == "broken":
            raise KeyError("a bug")
        if self.mode == "hangs":
            await self.hang.wait()

    async def _channel(self) -> RouterAddress:
        await self._ail()
        if self.streams is None:
            await self.listen()
        return RouterAddress(self._address, f"life-{self.epoch}")

    async def _members(self) -> list[tuple[WorkerInfo, bool]]:
        await self._ail()
        self.num_visits += 1
        return self.known

    async def route(self, asked: RouteQuery) -> RouteDecision:
        self.num_asked += 1
        try:
            if self.mode == "hangs":
                await self.hang.wait()
            await self.queue.wait()
        except asyncio.CancelledError:
            self.num_withdrawn += 1
            raise
        if self.error is not None:
            raise self.error
        return DECISION

    def first_token(self, request_id: RequestId, worker_id: WorkerId | None = None) -> None:
        self.noted.append(("first_token", request_id, str(worker_id)))

    def release(self, request_id: RequestId, worker_id: WorkerId | None = None) -> None:
        self.noted.append(("release", request_id, str(worker_id)))

    def worker_failed(self, worker_id: WorkerId, epoch: str, kind: str) -> None:
        self.noted.append(("worker_failed", worker_id, epoch))


@asynccontextmanager
async def gateway(
    actor: FakeActor, token: str = TOKEN, *, watch_period_s: float = NEVER_S, silence_s: float = NEVER_S
) -> AsyncIterator[RemoteRouter]:
    """With a stream to the router, unless the token is wrong. A visit that need not connect takes no time to speak of,
    so that a short `silence_s` strikes only a router that hangs."""
    await actor.listen()
    router = RemoteRouter("app", token, actor.find, watch_period_s=watch_period_s, silence_s=silence_s)
    router.start()
    await router.first_worker()
    if token == TOKEN:
        await eventually(lambda: router._link is not None and not router._link.is_lost and not router._is_down)
    try:
        yield router
    finally:
        await router.stop(patience_s=60)
        await actor.break_streams()


async def by_router(router: RemoteRouter) -> None:
    """Waits until the router decides again."""
    async with asyncio.timeout(60):
        while await router.route(query("again")) != DECISION:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_the_router_decides_while_it_answers() -> None:
    actor = FakeActor()
    async with gateway(actor) as router:
        assert await router.route(query()) == DECISION
        router.first_token(RequestId("r"), WorkerId("by-router"))
        router.release(RequestId("r"), WorkerId("by-router"))
        router.worker_failed(WorkerId("by-router"), "e")
        await eventually(lambda: len(actor.noted) >= 3)
        told = [
            ("first_token", "r", "by-router"),
            ("release", "r", "by-router"),
            ("worker_failed", "by-router", "e"),
        ]
        assert actor.noted == told
    assert router.num_local_routes == 0


async def test_news_of_the_last_moment_still_arrives() -> None:
    actor = FakeActor()
    async with gateway(actor) as router:
        router.release(RequestId("r"), WorkerId("by-router"))
    assert actor.noted == [("release", "r", "by-router")]


async def test_waiting_in_the_routers_queue_is_no_reason_to_decide_alone() -> None:
    actor = FakeActor()
    actor.queue.clear()
    async with gateway(actor, watch_period_s=0.05, silence_s=0.3) as router:
        asked = asyncio.create_task(router.route(query()))
        await eventually(lambda: actor.num_asked == 1)
        await asyncio.sleep(0.6)  # longer than the silence that counts as an outage
        assert not asked.done()
        actor.queue.set()
        assert await asked == DECISION


async def test_a_hanging_router_is_given_up_in_bounded_time_and_found_again() -> None:
    actor = FakeActor()
    async with gateway(actor, watch_period_s=0.05, silence_s=0.3) as router:
        actor.mode = "hangs"
        async with asyncio.timeout(60):
            assert (await router.route(query("a"))).worker_id == FALLBACK
        with pytest.raises(StopIteration) as placed:  # from then on nobody waits, not even for a turn of the loop
            router.route(query("b")).send(None)
        assert placed.value.value.worker_id == FALLBACK
        actor.mode = "well"
        actor.hang.set()
        await by_router(router)
        given_up = actor.num_withdrawn + actor.noted.count(("release", "a", "None"))
        assert given_up == 1  # else its place would wait for nobody
        assert actor.epoch == 1, "the stream had not broken"


@pytest.mark.parametrize("mode", ["dead", "unknown", "broken"])
async def test_a_dead_router_costs_no_wait(mode: str) -> None:
    """Its stream breaks, and that is enough: neither the watch nor a silence would end the wait."""
    actor = FakeActor()
    actor.queue.clear()
    async with gateway(actor) as router:
        asked = asyncio.create_task(router.route(query()))
        await eventually(lambda: actor.num_asked == 1)
        actor.mode = mode
        await actor.break_streams()
        async with asyncio.timeout(60):
            assert (await asked).worker_id == FALLBACK
            assert (await router.route(query("b"))).worker_id == FALLBACK
        assert router.num_workers == 1, "it goes on with the workers it knew"
        actor.mode = "well"
        actor.queue.set()
        await by_router(router)
        assert actor.epoch == 2


async def test_a_broken_stream_to_a_living_router_is_mended_at_once() -> None:
    actor = FakeActor()
    async with gateway(actor) as router:  # the watch alone would not notice
        await actor.break_streams()
        await eventually(lambda: actor.epoch == 2)
        await by_router(router)


async def test_a_gateway_that_is_not_let_in_places_alone_and_knows_the_workers() -> None:
    actor = FakeActor()
    async with gateway(actor, token="another") as router:
        assert (await router.route(query())).worker_id == FALLBACK
        num_visits = actor.num_visits
        await eventually(lambda: actor.num_visits >= num_visits + 2)
        assert (await router.route(query("b"))).worker_id == FALLBACK


async def test_a_client_that_leaves_the_queue_is_withdrawn() -> None:
    actor = FakeActor()
    actor.queue.clear()
    async with gateway(actor) as router:
        asked = asyncio.create_task(router.route(query("gone")))
        await eventually(lambda: actor.num_asked == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await eventually(lambda: actor.num_withdrawn == 1)


async def test_a_refusal_is_passed_on_and_is_no_outage() -> None:
    actor = FakeActor()
    actor.error = OverloadedError("full", retry_after_s=2.0)
    async with gateway(actor) as router:
        with pytest.raises(OverloadedError) as caught:
            await router.route(query())
        assert caught.value.retry_after_s == 2.0
        assert router.num_local_routes == 0


async def test_a_router_that_has_just_come_back_does_not_empty_the_list_of_workers() -> None:
    actor = FakeActor()
    async with gateway(actor, watch_period_s=0.05) as router:
        actor.known = []
        num_visits = actor.num_visits
        await eventually(lambda: actor.num_visits >= num_visits + 2)
        assert router.num_workers == 1
