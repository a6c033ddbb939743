"""A gateway's stream to a real router: who is let in, what waits, what is withdrawn, what outlives a broken stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from dispatch_rig import eventually
from router_builders import make_router, query

from cluster.api.errors import InternalError, RateLimitedError, UnavailableError
from cluster.api.ids import RequestId, WorkerId
from cluster.api.router_channel import FirstToken, Release, RouterAddress
from cluster.api.routing import RouteDecision
from cluster.router_link import RouterLink
from router.channel import RouterChannel
from router.config import AdmissionConfig, RouterConfig, TenantLimits
from router.router import Router

TOKEN, EPOCH = "token", "life"
ONE_PLACE = RouterConfig(admission=AdmissionConfig(extra_seqs_per_worker=0))


@asynccontextmanager
async def served(router: Router) -> AsyncIterator[RouterAddress]:
    channel = RouterChannel(router, TOKEN, EPOCH, "127.0.0.1")
    try:
        yield RouterAddress(await channel.start(), EPOCH)
    finally:
        await channel.stop(0)


@asynccontextmanager
async def linked(router: Router) -> AsyncIterator[RouterLink]:
    async with served(router) as where:
        link = RouterLink(where, TOKEN)
        assert await link.opened()
        yield link
        await link.close()


def one_place() -> Router:
    return make_router(1, ONE_PLACE, max_num_seqs=1)[0]


async def test_a_place_is_held_until_it_is_released_with_its_worker() -> None:
    router = one_place()
    async with linked(router) as link:
        decision = await link.route(query("a"))
        assert decision is not None
        link.tell([FirstToken(RequestId("a"), WorkerId("another")), Release(RequestId("a"), WorkerId("another"))])
        link.tell([FirstToken(RequestId("a"), decision.worker_id)])
        await eventually(lambda: router.stats().workers[0].num_prefilling == 0)
        assert router.stats().num_reservations == 1, "the word of another worker's attempt changes nothing"
        link.tell([Release(RequestId("a"), decision.worker_id)])
        await eventually(lambda: router.stats().num_reservations == 0)


@pytest.mark.parametrize(("token", "epoch"), [("guess", EPOCH), ("", EPOCH), (TOKEN, "earlier life")])
async def test_only_the_token_and_this_life_open_the_stream(token: str, epoch: str) -> None:
    router = one_place()
    async with served(router) as where:
        link = RouterLink(RouterAddress(where.address, epoch), token)
        assert await link.route(query("a")) is None
        assert not await link.opened()
        await link.close()
    assert router.stats().counters.num_decisions == 0, "its question was not even read"


async def test_an_address_where_nobody_listens_is_a_lost_router() -> None:
    async with served(one_place()) as where:
        pass
    link = RouterLink(where, TOKEN)
    async with asyncio.timeout(60):
        assert await link.route(query("a")) is None
        assert not await link.opened()
    await link.close()


async def test_one_question_waits_while_others_are_answered() -> None:
    router = make_router(2, ONE_PLACE, max_num_seqs=1)[0]
    async with linked(router) as link:
        first, second = await link.route(query("a")), await link.route(query("b"))
        assert first is not None
        assert second is not None
        waiting = asyncio.create_task(link.route(query("c")))
        await eventually(lambda: router.stats().num_queued == 1)
        assert await link.route(query("b")) == second
        link.tell([Release(RequestId("a"), first.worker_id)])
        assert (await waiting) == first


async def test_a_cancelled_question_leaves_the_queue_and_the_id_can_be_asked_again() -> None:
    router = one_place()
    async with linked(router) as link:
        held = await link.route(query("a"))
        assert held is not None
        waiting = asyncio.create_task(link.route(query("b")))
        await eventually(lambda: router.stats().num_queued == 1)
        waiting.cancel()
        again = asyncio.create_task(link.route(query("b")))
        await eventually(lambda: router.stats().counters.num_aborted_waiting == 1)
        assert router.stats().num_queued == 1
        link.tell([Release(RequestId("a"), held.worker_id)])
        assert await again == held
        assert router.stats().num_reservations == 1


async def test_a_question_cancelled_at_once_holds_no_place() -> None:
    """Before its answer can have come: whether the router has placed it by then or not."""
    router = one_place()
    async with linked(router) as link:
        for number in range(20):
            asked = asyncio.create_task(link.route(query(f"r{number}")))
            for _ in range(number):
                await asyncio.sleep(0)
            asked.cancel()
            (given,) = await asyncio.gather(asked, return_exceptions=True)
            if isinstance(given, RouteDecision):  # it was too late to cancel
                link.tell([Release(RequestId(f"r{number}"), given.worker_id)])
        decision = await link.route(query("after all of them"))
        assert decision is not None
        assert router.stats().num_reservations == 1


async def test_a_router_given_up_answers_nobody_and_keeps_no_place_for_them() -> None:
    router = one_place()
    async with linked(router) as link:
        held = await link.route(query("a"))
        assert held is not None
        waiting = asyncio.create_task(link.route(query("b")))
        await eventually(lambda: router.stats().num_queued == 1)
        link.give_up()
        assert await waiting is None
        await eventually(lambda: router.stats().num_queued == 0)
        assert not link.is_lost


async def test_a_gateway_that_dies_leaves_nothing_in_the_queue() -> None:
    router = one_place()
    async with served(router) as where:
        dying, other = RouterLink(where, TOKEN), RouterLink(where, TOKEN)
        held = await other.route(query("a"))
        assert held is not None
        waiting = asyncio.create_task(dying.route(query("b")))
        behind = asyncio.create_task(other.route(query("c")))
        await eventually(lambda: router.stats().num_queued == 2)
        await dying._stream.close()  # without last words
        assert await waiting is None
        await eventually(lambda: router.stats().num_queued == 1)
        other.tell([Release(RequestId("a"), held.worker_id)])
        assert await behind == held
        await other.close()


async def test_a_link_whose_closing_was_given_up_can_be_closed_again() -> None:
    async with served(one_place()) as where:
        link = RouterLink(where, TOKEN)
        closing = asyncio.create_task(link._stream.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await link.close()
        assert link.is_lost


async def test_refusals_keep_their_kind_and_their_time() -> None:
    router, _, _ = make_router(1, RouterConfig(admission=AdmissionConfig(worker_wait_s=0.0)))
    router.set_tenant_limits(b"poor", TenantLimits(requests_per_min=1))
    async with linked(router) as link:
        await link.route(query("a", tenant_hash=b"poor"))
        with pytest.raises(RateLimitedError) as caught:
            await link.route(query("b", tenant_hash=b"poor"))
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s > 1.0
        with pytest.raises(UnavailableError):
            await link.route(query("c", model="unknown"))


class _Broken(Router):
    async def route(self, query: object) -> None:  # type: ignore[override]
        raise ZeroDivisionError("the tenant's secret")


async def test_a_bug_in_the_router_is_told_without_details_and_ends_no_stream() -> None:
    async with linked(_Broken(make_router(1)[2])) as link:
        for request_id in ("a", "b"):
            with pytest.raises(InternalError) as caught:
                await link.route(query(request_id))
            assert "secret" not in str(caught.value)
