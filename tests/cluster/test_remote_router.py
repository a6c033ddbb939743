"""A gateway and its router: in answer, in a queue, hanging, gone, back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray

from cluster.api.errors import OverloadedError
from cluster.api.ids import RequestId, WorkerId
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.worker_state import WorkerInfo
from cluster.remote_router import RemoteRouter

DECISION = RouteDecision(WorkerId("by-router"), "e", "address", "n", 0)
FALLBACK = WorkerId("w0")


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
    """Answers like the router's actor; `mode` is what ails it."""

    def __init__(self) -> None:
        self.mode = "well"
        self.hang = asyncio.Event()
        self.queue = asyncio.Event()
        self.queue.set()
        self.noted: list[tuple[str, tuple[Any, ...]]] = []
        self.known = [(worker(), True)]
        self.error: Exception | None = None
        self.route, self.members, self.notes = _Method(self._route), _Method(self._members), _Method(self._notes)

    def find(self, name: str) -> FakeActor:
        if self.mode == "unknown":
            raise ValueError("no such actor")
        return self

    async def _ail(self) -> None:
        if self.mode == "dead":
            raise ray.exceptions.ActorDiedError()
        if self.mode == "hangs":
            await self.hang.wait()

    async def _route(self, asked: RouteQuery) -> RouteDecision:
        await self._ail()
        await self.queue.wait()
        if self.error is not None:
            raise ray.exceptions.RayTaskError("route", "trace", self.error)
        return DECISION

    async def _members(self) -> list[tuple[WorkerInfo, bool]]:
        await self._ail()
        return self.known

    async def _notes(self, notes: list[tuple[str, tuple[Any, ...]]]) -> None:
        self.noted += notes


@asynccontextmanager
async def gateway(actor: FakeActor) -> AsyncIterator[RemoteRouter]:
    router = RemoteRouter("app", actor.find)
    router.start()
    await router.first_worker()
    try:
        yield router
    finally:
        await router.stop()


async def test_the_router_decides_while_it_answers() -> None:
    actor = FakeActor()
    async with gateway(actor) as router:
        assert await router.route(query()) == DECISION
        router.first_token(RequestId("r"), WorkerId("by-router"))
        router.release(RequestId("r"), WorkerId("by-router"))
        await asyncio.sleep(0.1)
    assert actor.noted == [("first_token", ("r", "by-router")), ("release", ("r", "by-router"))]
    assert router.num_local_routes == 0


async def test_waiting_in_the_routers_queue_is_no_reason_to_decide_alone() -> None:
    actor = FakeActor()
    actor.queue.clear()
    async with gateway(actor) as router:
        asked = asyncio.create_task(router.route(query()))
        await asyncio.sleep(4.5)  # longer than the silence that counts as an outage
        assert not asked.done()
        actor.queue.set()
        assert await asked == DECISION


async def test_a_hanging_router_is_given_up_in_bounded_time_and_found_again() -> None:
    actor = FakeActor()
    async with gateway(actor) as router:
        actor.mode = "hangs"
        async with asyncio.timeout(6.0):
            assert (await router.route(query("a"))).worker_id == FALLBACK
        async with asyncio.timeout(0.05):  # from then on nobody waits
            assert (await router.route(query("b"))).worker_id == FALLBACK
        actor.mode = "well"
        actor.hang.set()
        async with asyncio.timeout(5.0):
            while await router.route(query("c")) != DECISION:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
        assert ("withdraw", ("a",)) in actor.noted  # else its place would wait for nobody


@pytest.mark.parametrize("mode", ["dead", "unknown"])
async def test_a_dead_router_costs_no_wait(mode: str) -> None:
    actor = FakeActor()
    async with gateway(actor) as router:
        actor.mode = mode
        async with asyncio.timeout(3.0):
            while (await router.route(query())) == DECISION:  # "unknown" shows when the handle is looked up again
                router._actor = None
        assert router.num_workers == 1, "it goes on with the workers it knew"
        actor.mode = "well"
        async with asyncio.timeout(3.0):
            while await router.route(query()) != DECISION:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_client_that_leaves_the_queue_is_withdrawn() -> None:
    actor = FakeActor()
    actor.queue.clear()
    async with gateway(actor) as router:
        asked = asyncio.create_task(router.route(query("gone")))
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await asyncio.sleep(0.1)
    assert ("withdraw", ("gone",)) in actor.noted


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
    async with gateway(actor) as router:
        actor.known = []
        await asyncio.sleep(1.3)
        assert router.num_workers == 1
