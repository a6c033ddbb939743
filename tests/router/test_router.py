"""The router as its callers see it."""

from __future__ import annotations

import asyncio

import pytest
from router_builders import keys, make_router, query, snapshot, store, worker_info

from cluster.api.errors import (
    DeadlineExceededError,
    OverloadedError,
    RateLimitedError,
    UnavailableError,
)
from cluster.api.ids import RequestId, WorkerId
from router.circuit import FailureKind
from router.config import AdmissionConfig, RouterConfig, TenantLimits
from router.router import Router


def check_integrity(router: Router) -> None:
    router.reservations.check_integrity()
    for record in router.registry.records():
        record.load.check_integrity()


async def test_a_returning_prefix_goes_to_its_holder_and_tells_the_match() -> None:
    router, _, index = make_router(4)
    prompt = keys("chat", 10)
    store(index, "w2", prompt[:8])
    for number, expected in enumerate([8, 10, 10]):  # the rest of the prompt is expected there from then on
        decision = await router.route(query(f"r{number}", block_keys=prompt))
        assert (decision.worker_id, decision.epoch, decision.num_matched_blocks) == ("w2", "e1", expected)
        router.first_token(RequestId(f"r{number}"))
        router.release(RequestId(f"r{number}"))


async def test_a_longer_queue_outweighs_a_shorter_prefix() -> None:
    router, _, index = make_router(2)
    prompt = keys("chat", 10)
    store(index, "w0", prompt)
    await router.route(query("long", 6400, excluded=(WorkerId("w1"),)))
    assert (await router.route(query("r", block_keys=prompt))).worker_id == "w1"


async def test_unknown_prefixes_spread_by_tokens_not_by_requests() -> None:
    router, _, _ = make_router(2)
    first = (await router.route(query("big", 6400))).worker_id
    others = [(await router.route(query(f"s{number}", 160))).worker_id for number in range(6)]
    assert all(worker_id != first for worker_id in others)


async def test_a_burst_with_one_new_prefix_stays_together_before_any_event() -> None:
    router, _, _ = make_router(4, RouterConfig(congestion_per_s=0.3))
    shared = keys("new", 400)
    workers = {(await router.route(query(f"r{n}", 6410, block_keys=shared))).worker_id for n in range(3)}
    assert len(workers) == 1


async def test_speculation_ends_when_no_event_confirms_it() -> None:
    router, clock, _ = make_router(1)
    shared = keys("new", 10)
    await router.route(query("a", block_keys=shared))
    assert (await router.route(query("b", block_keys=shared))).num_matched_blocks == 10
    clock.advance(2.9)
    router.report(snapshot())
    clock.advance(2.2)
    assert (await router.route(query("c", block_keys=shared))).num_matched_blocks == 0


async def test_the_same_request_gets_the_same_place_once() -> None:
    router, _, _ = make_router(4)
    decisions = {await router.route(query("r", 6400)) for _ in range(5)}
    assert len(decisions) == 1
    assert router.stats().num_reservations == 1
    check_integrity(router)


async def test_first_token_and_release_are_harmless_when_told_twice_or_for_nobody() -> None:
    router, _, _ = make_router(1)
    await router.route(query("r"))
    for _ in range(2):
        router.first_token(RequestId("r"))
        router.first_token(RequestId("nobody"))
    for _ in range(2):
        router.release(RequestId("r"))
        router.release(RequestId("nobody"))
    stats = router.stats()
    assert stats.num_reservations == 0
    assert (stats.workers[0].num_running, stats.workers[0].pending_prefill_tokens) == (0, 0)
    check_integrity(router)


async def test_a_retry_avoids_the_tried_worker_and_moves_its_place() -> None:
    router, _, _ = make_router(2)
    first = await router.route(query("r"))
    second = await router.route(query("r", excluded=(first.worker_id,)))
    assert second.worker_id != first.worker_id
    by_worker = {worker.worker_id: worker.num_running for worker in router.stats().workers}
    assert by_worker == {first.worker_id: 0, second.worker_id: 1}


async def test_a_resumed_stream_goes_only_to_equal_numerics() -> None:
    router, _, _ = make_router(0)
    router.register(worker_info("avx", numerics="avx2"))
    router.register(worker_info("amx", numerics="amx"))
    for number in range(8):
        assert (await router.route(query(f"r{number}", numerics="amx"))).worker_id == "amx"


async def test_no_worker_that_fits_is_unavailable_after_a_bounded_wait() -> None:
    config = RouterConfig(admission=AdmissionConfig(worker_wait_s=0.02))
    router, _, _ = make_router(1, config)
    with pytest.raises(UnavailableError) as caught:
        await router.route(query("r", numerics="other"))
    assert caught.value.retry_after_s is not None
    assert router.stats().num_queued == 0


async def test_a_request_that_came_before_its_worker_is_served_when_it_registers() -> None:
    router, _, _ = make_router(0)
    task = asyncio.create_task(router.route(query("r")))
    await asyncio.sleep(0)
    router.register(worker_info("late"))
    assert (await task).worker_id == "late"


async def test_a_silent_worker_takes_no_work_until_it_is_heard_again() -> None:
    router, clock, _ = make_router(2)
    clock.advance(3.5)
    assert router.report(snapshot("w1"))
    assert {(await router.route(query(f"a{n}"))).worker_id for n in range(6)} == {"w1"}
    assert router.report(snapshot("w0"))
    assert (await router.route(query("b"))).worker_id == "w0"


async def test_a_draining_worker_takes_no_new_work_but_keeps_its_places() -> None:
    router, _, _ = make_router(2)
    held = await router.route(query("r", excluded=(WorkerId("w1"),)))
    router.report(snapshot("w0", is_draining=True, request_ids=(RequestId("r"),)))
    assert held.worker_id == "w0"
    assert {(await router.route(query(f"a{n}"))).worker_id for n in range(6)} == {"w1"}
    assert router.stats().workers[0].num_running == 1


async def test_a_new_epoch_ends_the_places_of_the_old_and_refuses_its_late_reports() -> None:
    router, _, _ = make_router(1)
    await router.route(query("r"))
    router.register(worker_info("w0", "e2"))
    assert router.stats().num_reservations == 0
    assert not router.report(snapshot("w0", "e1"))
    assert router.report(snapshot("w0", "e2"))
    assert (await router.route(query("r"))).epoch == "e2"
    check_integrity(router)


async def test_an_unknown_worker_is_asked_to_register() -> None:
    router, _, _ = make_router(0)
    assert not router.report(snapshot("w9"))


async def test_a_dead_worker_is_avoided_at_once_and_tried_again_after_the_cooldown() -> None:
    router, clock, _ = make_router(2)
    router.worker_failed(WorkerId("w0"), "e1", FailureKind.DIED)
    assert {(await router.route(query(f"a{n}"))).worker_id for n in range(6)} == {"w1"}
    clock.advance(2.5)
    router.report(snapshot("w0"))
    router.report(snapshot("w1", pending_prefill_tokens=5000))
    assert (await router.route(query("trial"))).worker_id == "w0"
    assert (await router.route(query("beside"))).worker_id == "w1"  # half open: one trial at a time
    router.first_token(RequestId("trial"))
    assert (await router.route(query("after"))).worker_id == "w0"


async def test_client_faults_never_open_the_circuit() -> None:
    router, _, _ = make_router(1)
    for _ in range(50):
        router.worker_failed(WorkerId("w0"), "e1", "client_error")
        router.worker_failed(WorkerId("w0"), "e1", "aborted")
    assert (await router.route(query("r"))).worker_id == "w0"
    for _ in range(3):
        router.worker_failed(WorkerId("w0"), "e1", "timeout")
    assert router.stats().workers[0].is_circuit_open  # what is guarded can be seen


async def test_a_failure_of_an_earlier_epoch_is_ignored() -> None:
    router, _, _ = make_router(1)
    router.worker_failed(WorkerId("w0"), "e0", FailureKind.DIED)
    assert not router.stats().workers[0].is_circuit_open


async def test_a_leaked_place_is_healed_by_the_workers_own_report() -> None:
    router, clock, _ = make_router(1)
    await router.route(query("leaked"))
    await router.route(query("alive"))
    clock.advance(2)
    router.report(snapshot(request_ids=(RequestId("alive"),), pending_prefill_tokens=100))
    assert router.stats().num_reservations == 2  # too young: it may still be on its way
    clock.advance(4)
    router.report(snapshot(request_ids=(RequestId("alive"),), pending_prefill_tokens=100))
    stats = router.stats()
    assert (stats.num_reservations, stats.counters.num_healed) == (1, 1)
    assert stats.workers[0].pending_prefill_tokens == 100
    check_integrity(router)


async def test_work_that_came_past_this_router_counts() -> None:
    router, _, _ = make_router(2)
    foreign = tuple(RequestId(f"f{n}") for n in range(3))
    router.report(snapshot("w0", request_ids=foreign, num_running=3, pending_prefill_tokens=4000))
    stats = router.stats().workers[0]
    assert (stats.num_running, stats.pending_prefill_tokens) == (3, 4000)
    assert (await router.route(query("r"))).worker_id == "w1"
    router.report(snapshot("w0"))
    assert router.stats().workers[0].num_running == 0
    check_integrity(router)


async def test_a_session_stays_where_it_was_as_long_as_that_costs_little() -> None:
    router, _, _ = make_router(8)
    first = await router.route(query("r0", 16, affinity_key="s"))
    router.release(RequestId("r0"))
    for number in range(1, 6):
        decision = await router.route(query(f"r{number}", 16, affinity_key="s"))
        assert decision.worker_id == first.worker_id
        router.release(RequestId(f"r{number}"))
    other = {
        (await router.route(query(f"o{n}", 16, affinity_key="s", tenant_hash=b"other"))).worker_id for n in range(3)
    }
    assert other != {first.worker_id}  # another tenant's session of the same name is another session


class TestWaiting:
    CONFIG = RouterConfig(admission=AdmissionConfig(max_queued_requests=2, extra_seqs_per_worker=0))

    async def test_beyond_the_queue_the_tenant_with_most_waiting_is_turned_away(self) -> None:
        router, _, _ = make_router(1, self.CONFIG, max_num_seqs=1)
        await router.route(query("running"))
        waiting = [asyncio.create_task(router.route(query(f"w{n}"))) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as caught:
            await router.route(query("third"))
        assert caught.value.retry_after_s is not None
        quiet = asyncio.create_task(router.route(query("quiet", tenant_hash=b"quiet")))
        with pytest.raises(OverloadedError):
            await waiting[1]
        router.release(RequestId("running"))
        await asyncio.sleep(0)
        router.release(RequestId("w0"))
        assert (await quiet).worker_id == "w0"

    async def test_a_caller_that_leaves_the_queue_leaves_nothing_behind(self) -> None:
        router, _, _ = make_router(1, self.CONFIG, max_num_seqs=1)
        await router.route(query("running"))
        task = asyncio.create_task(router.route(query("gone")))
        await asyncio.sleep(0)
        assert router.stats().num_queued == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        router.release(RequestId("running"))
        stats = router.stats()
        assert (stats.num_queued, stats.num_reservations) == (0, 0)

    async def test_a_place_given_in_the_moment_of_cancellation_comes_back(self) -> None:
        router, _, _ = make_router(1, self.CONFIG, max_num_seqs=1)
        await router.route(query("running"))
        task = asyncio.create_task(router.route(query("gone")))
        await asyncio.sleep(0)
        router.release(RequestId("running"))
        assert router.stats().num_reservations == 1  # it has been given to the waiting request
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert router.stats().num_reservations == 0

    async def test_a_deadline_in_the_queue_ends_the_wait(self) -> None:
        router, clock, _ = make_router(1, self.CONFIG, max_num_seqs=1)
        await router.route(query("running"))
        with pytest.raises((DeadlineExceededError, OverloadedError)):
            await router.route(query("late", deadline_unix_s=clock() + 0.02))
        with pytest.raises(DeadlineExceededError):
            await router.route(query("past", deadline_unix_s=clock() - 1))
        assert router.stats().num_queued == 0

    async def test_rates_per_minute_are_kept_and_say_when_to_come_again(self) -> None:
        router, clock, _ = make_router(1)
        router.set_tenant_limits(b"tenant", TenantLimits(requests_per_min=2))
        for number in range(2):
            await router.route(query(f"r{number}"))
        with pytest.raises(RateLimitedError) as caught:
            await router.route(query("r2"))
        assert caught.value.retry_after_s == pytest.approx(30)
        await router.route(query("other", tenant_hash=b"other"))
        clock.advance(2.9)  # within the heartbeat
        with pytest.raises(RateLimitedError):
            await router.route(query("r3"))
        clock.advance(27.2)
        router.report(snapshot())
        await router.route(query("r4"))

    async def test_a_retry_is_not_charged_again(self) -> None:
        router, _, _ = make_router(2)
        router.set_tenant_limits(b"tenant", TenantLimits(requests_per_min=1))
        first = await router.route(query("r"))
        assert (await router.route(query("r", excluded=(first.worker_id,)))).worker_id != first.worker_id


async def test_a_late_release_of_a_lost_attempt_leaves_the_new_place_alone() -> None:
    router, _, _ = make_router(2)
    first = await router.route(query("r"))
    second = await router.route(query("r", excluded=(first.worker_id,)))
    router.first_token(RequestId("r"), first.worker_id)
    router.release(RequestId("r"), first.worker_id)
    assert router.stats().num_reservations == 1
    assert router.registry.get(second.worker_id).load.candidate.num_prefilling == 1
    router.release(RequestId("r"), second.worker_id)
    assert router.stats().num_reservations == 0
    check_integrity(router)


async def test_a_cancelled_request_leaves_the_queue_and_holds_no_place() -> None:
    config = RouterConfig(admission=AdmissionConfig(extra_seqs_per_worker=0))
    router, _, _ = make_router(1, config, max_num_seqs=1)
    await router.route(query("running"))
    waiting = asyncio.ensure_future(router.route(query("waiting")))
    behind = asyncio.ensure_future(router.route(query("behind")))
    await asyncio.sleep(0)
    waiting.cancel()
    router.release(RequestId("running"))  # before the cancelled one could even notice
    assert (await behind).worker_id == "w0"
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert router.stats().num_queued == 0
    router.release(RequestId("behind"))
    router.release(RequestId("nobody"))
    assert router.stats().num_reservations == 0
    check_integrity(router)
