"""Placement by a gateway on its own, within its share of the limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from router_builders import ManualClock, query, worker_info

from cluster.api.errors import OverloadedError, RateLimitedError, UnavailableError
from cluster.api.ids import RequestId, WorkerId
from router.config import AdmissionConfig, RouterConfig, TenantLimits
from router.fallback import FallbackConfig, FallbackRouter
from router.settings import RouterSettings


def make_fallback(
    num_workers: int = 4,
    *,
    clock: ManualClock | None = None,
    num_gateways: int = 1,
    settings: RouterSettings | None = None,
    max_num_seqs: int = 1000,
) -> FallbackRouter:
    clock = clock or ManualClock()
    config = FallbackConfig(num_gateways=num_gateways)
    fallback = FallbackRouter(config, settings, clock=clock, unix_clock=clock)
    fallback.update([worker_info(f"w{n}", max_num_seqs=max_num_seqs) for n in range(num_workers)])
    return fallback


def limited(**limits: float) -> RouterSettings:
    return RouterSettings(RouterConfig(admission=AdmissionConfig(default_limits=TenantLimits(**limits))))


async def worker_of(fallback: FallbackRouter, user: str, request: str = "r") -> str:
    decision = await fallback.route(query(request, user_hash=user.encode()))
    fallback.release(RequestId(request), decision.worker_id)
    return decision.worker_id


async def test_every_gateway_sends_a_user_to_the_same_worker_and_users_spread() -> None:
    one, other = make_fallback(), make_fallback()
    placed = {f"user{n}": await worker_of(one, f"user{n}") for n in range(400)}
    assert placed == {user: await worker_of(other, user) for user in placed}
    counts = Counter(placed.values())
    assert len(counts) == 4
    assert max(counts.values()) < 2 * min(counts.values())


async def test_a_lost_worker_moves_only_its_own_users() -> None:
    fallback = make_fallback()
    before = {f"user{n}": await worker_of(fallback, f"user{n}") for n in range(200)}
    fallback.update([worker_info(f"w{n}") for n in (0, 1, 3)])
    for user, worker_id in before.items():
        after = await worker_of(fallback, user)
        assert after == worker_id if worker_id != "w2" else after != "w2"


async def test_no_worker_takes_more_than_its_share_of_one_users_burst() -> None:
    fallback = make_fallback()
    counts = Counter([(await fallback.route(query(f"r{n}"))).worker_id for n in range(100)])
    assert max(counts.values()) <= 1.25 * 100 / 4 + 1
    assert min(counts.values()) > 0


async def test_places_come_back_once_and_a_repeated_request_holds_one() -> None:
    fallback = make_fallback(1)
    for _ in range(3):
        await fallback.route(query("r"))
    assert fallback.num_running(WorkerId("w0")) == 1
    for _ in range(3):
        fallback.release(RequestId("r"), WorkerId("w0"))
    assert fallback.num_running(WorkerId("w0")) == 0


async def test_a_failed_life_is_left_alone_for_a_while_another_life_is_not() -> None:
    clock = ManualClock()
    fallback = make_fallback(2, clock=clock)
    fallback.worker_failed(WorkerId("w0"), "e1")
    users = [f"user{n}" for n in range(20)]
    assert {await worker_of(fallback, user) for user in users} == {"w1"}
    clock.advance(6)
    assert {await worker_of(fallback, user) for user in users} == {"w0", "w1"}
    fallback.worker_failed(WorkerId("w0"), "e1")
    fallback.update([worker_info("w0", "e2"), worker_info("w1")])
    assert {await worker_of(fallback, user) for user in users} == {"w0", "w1"}


async def test_excluded_and_unequal_workers_are_not_used() -> None:
    fallback = make_fallback(2, settings=RouterSettings(RouterConfig(admission=AdmissionConfig(worker_wait_s=0))))
    assert (await fallback.route(query("a", excluded=(WorkerId("w0"),)))).worker_id == "w1"
    with pytest.raises(UnavailableError):
        await fallback.route(query("b", numerics="other"))
    with pytest.raises(UnavailableError):
        await fallback.route(query("c", num_prompt_tokens=1_000_000, block_keys=()))


async def test_workers_stay_alive_for_as_long_as_there_is_no_router() -> None:
    clock = ManualClock()
    fallback = make_fallback(clock=clock)
    clock.advance(86_400)
    assert await worker_of(fallback, "user")


async def test_gateways_share_a_tenants_rate() -> None:
    """Four of them together let through what the router would; another tenant is not concerned."""
    gateways = [make_fallback(num_gateways=4, settings=limited(requests_per_min=20)) for _ in range(4)]
    passed = 0
    for number, fallback in enumerate(gateways):
        for turn in range(20):
            with contextlib.suppress(RateLimitedError):
                await worker_of(fallback, "user", f"r{number}-{turn}")
                passed += 1
        await fallback.route(query("other", tenant_hash=b"other"))
    assert passed == 20


async def test_a_tenants_own_limits_hold_too() -> None:
    own = RouterSettings(tenant_limits=((b"tenant", TenantLimits(tokens_per_min=1000)),))
    fallback = make_fallback(settings=own)
    for number in range(4):
        await worker_of(fallback, "user", f"r{number}")  # 224 tokens each
    with pytest.raises(RateLimitedError):
        await worker_of(fallback, "user", "one too many")


async def test_gateways_share_a_workers_places_and_the_queue_is_bounded() -> None:
    admission = AdmissionConfig(max_queued_requests=4, extra_seqs_per_worker=0)
    settings = RouterSettings(RouterConfig(admission=admission))
    fallback = make_fallback(1, num_gateways=2, settings=settings, max_num_seqs=8)
    for number in range(4):
        await fallback.route(query(f"r{number}"))
    waiting = [asyncio.create_task(fallback.route(query(f"q{number}"))) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await fallback.route(query("one too many"))
    fallback.release(RequestId("r0"), WorkerId("w0"))
    assert (await waiting[0]).worker_id == "w0"
    assert not waiting[1].done()
    waiting[1].cancel()


async def test_places_follow_a_batch_size_that_grows() -> None:
    settings = RouterSettings(RouterConfig(admission=AdmissionConfig(max_queued_requests=0, extra_seqs_per_worker=0)))
    fallback = make_fallback(1, settings=settings, max_num_seqs=1)
    await fallback.route(query("a"))
    with pytest.raises(OverloadedError):
        await fallback.route(query("b"))
    fallback.update([worker_info("w0", max_num_seqs=2)])
    assert (await fallback.route(query("c"))).worker_id == "w0"


async def test_one_tenant_that_floods_leaves_a_place_to_another() -> None:
    settings = RouterSettings(RouterConfig(admission=AdmissionConfig(extra_seqs_per_worker=0)))
    fallback = make_fallback(1, settings=settings, max_num_seqs=4)
    await worker_of(fallback, "user", "seen")  # the flooding one is not alone
    await fallback.route(query("small", tenant_hash=b"small"))
    fallback.release(RequestId("small"), WorkerId("w0"))
    flood = [asyncio.create_task(fallback.route(query(f"r{number}"))) for number in range(8)]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert (await fallback.route(query("again", tenant_hash=b"small"))).worker_id == "w0"
    for task in flood:
        task.cancel()


@pytest.mark.parametrize("values", [{"load_factor": 1.0}, {"num_gateways": 0}, {"cooldown_s": -1.0}])
def test_settings_are_checked(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="allowed are"):
        FallbackConfig(**values)  # type: ignore[arg-type]
