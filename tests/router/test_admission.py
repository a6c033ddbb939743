"""Fairness between tenants, bounds, rates and deadlines."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest
from router_builders import make_router, query

from cluster.api.errors import OverloadedError
from cluster.api.ids import RequestId
from router.admission import Admission, Waiting
from router.config import AdmissionConfig, CircuitConfig, RouterConfig, TenantLimits
from router.fair_queue import FairQueue
from router.rate_limit import RateLimit, TokenBucket


def serve(queue: FairQueue[str], count: int) -> list[str]:
    served = []
    for _ in range(count):
        entry = next(queue.heads())
        queue.serve(entry)
        served.append(entry.item)
    return served


class TestFairQueue:
    def test_a_newcomer_passes_a_flood(self) -> None:
        queue: FairQueue[str] = FairQueue()
        for number in range(100):
            queue.push("flood", 10, 1.0, f"flood{number}")
        serve(queue, 5)
        queue.push("quiet", 10, 1.0, "quiet")
        assert "quiet" in serve(queue, 2)

    def test_service_is_in_proportion_to_weights_counted_in_tokens(self) -> None:
        queue: FairQueue[str] = FairQueue()
        random = Random(2)
        costs = {"a": 0.0, "b": 0.0, "c": 0.0}
        sizes = {"a": 10, "b": 100, "c": 1000}
        for flow, weight in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
            for _ in range(40_000 // sizes[flow]):
                queue.push(flow, sizes[flow] * random.uniform(0.5, 1.5), weight, flow)
        while sum(costs.values()) < 40_000:
            entry = next(queue.heads())
            queue.serve(entry)
            costs[entry.item] += entry.cost
        assert costs["a"] == pytest.approx(10_000, rel=0.15)
        assert costs["b"] == pytest.approx(10_000, rel=0.15)
        assert costs["c"] == pytest.approx(20_000, rel=0.15)

    def test_idle_time_is_not_saved_up(self) -> None:
        queue: FairQueue[str] = FairQueue()
        for number in range(50):
            queue.push("busy", 10, 1.0, f"busy{number}")
        serve(queue, 50)
        for number in range(10):
            queue.push("late", 10, 1.0, f"late{number}")
            queue.push("busy", 10, 1.0, f"again{number}")
        first = serve(queue, 10)
        assert 4 <= sum(item.startswith("late") for item in first) <= 6

    def test_removal_takes_the_charge_back_and_happens_once(self) -> None:
        queue: FairQueue[str] = FairQueue()
        entries = [queue.push("a", 100, 1.0, f"a{n}") for n in range(5)]
        for entry in entries[:4]:
            assert queue.remove(entry)
            assert not queue.remove(entry)
        queue.push("b", 100, 1.0, "b0")
        assert serve(queue, 2) == ["a4", "b0"]
        assert len(queue) == 0
        assert queue.queued_cost() == 0

    def test_what_is_shed_is_the_newest_of_the_longest(self) -> None:
        queue: FairQueue[str] = FairQueue()
        for number in range(5):
            queue.push("many small", 1, 1.0, f"s{number}")
        queue.push("few large", 100, 1.0, "l0")
        queue.push("few large", 100, 1.0, "l1")
        queue.push("heavy but entitled", 150, 10.0, "h")
        victim = queue.newest_of_longest()
        assert victim is not None
        assert victim.item == "l1"


class TestRateLimit:
    def test_a_bucket_refills_steadily_and_holds_one_minute(self) -> None:
        bucket = TokenBucket(60.0, 0.0)
        bucket.take(60)
        assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
        assert bucket.wait_s(1, 1.0) == 0
        assert bucket.wait_s(60, 1e6) == 0
        assert bucket.wait_s(61, 1e6) == 0  # more than it holds: passes a full bucket, and leaves a debt
        bucket.take(120)
        assert bucket.wait_s(1, 1e6) == pytest.approx(61.0)

    def test_a_refused_request_takes_from_neither_bucket(self) -> None:
        rate = RateLimit(TenantLimits(requests_per_min=10, tokens_per_min=100), 0.0)
        assert rate.take(90, 0.0) == 0
        assert rate.take(50, 0.0) == pytest.approx(24.0)
        assert rate.take(10, 0.0) == 0


class TestAdmission:
    def test_a_deadline_that_cannot_be_met_is_refused_at_once(self) -> None:
        admission = Admission(AdmissionConfig())
        for number in range(20):
            waiting = Waiting(query(f"r{number}", 1000), 1e9)
            admission.enqueue(waiting, is_retry=False, now_s=0.0)
        for second in range(1, 11):
            admission.served(next(admission.queue.heads()), float(second))
        late = query("late", 1000)
        wait_s = admission.expected_wait_s(late.tenant_hash, late)
        assert wait_s == pytest.approx(10.0, rel=0.2)
        with pytest.raises(OverloadedError) as caught:
            admission.check_deadline(late, 15.0, 10.0)
        assert caught.value.retry_after_s == pytest.approx(wait_s)
        admission.check_deadline(late, 30.0, 10.0)
        other = query("other", 1000, tenant_hash=b"other")
        assert admission.expected_wait_s(other.tenant_hash, other) < 1.0  # the queue is another tenant's

    def test_places_are_kept_from_who_holds_its_share_while_others_are_active(self) -> None:
        admission = Admission(AdmissionConfig(extra_seqs_per_worker=2, reserved_seqs_per_worker=1))
        admission.check_rate(query("a", tenant_hash=b"a"), 0.0)
        assert admission.spare_seqs(60, num_places=64, now_s=1.0) == 2  # nobody else is there
        admission.check_rate(query("b", tenant_hash=b"b"), 2.0)
        assert [admission.spare_seqs(held, 64, 2.0) for held in (0, 1, 31, 32, 60)] == [2, 2, 2, -1, -1]
        for name in (b"c", b"d"):
            admission.check_rate(query("r", tenant_hash=name), 3.0)
        assert [admission.spare_seqs(held, 64, 3.0) for held in (0, 15, 16)] == [2, 2, -1]
        assert admission.spare_seqs(60, 64, 3.0 + 601.0) == 2


class FakeCluster:
    """Serves placed requests in virtual time: each takes `service_s` on its slot."""

    def __init__(self, num_workers: int, max_num_seqs: int, config: RouterConfig) -> None:
        self.router, self.clock, _ = make_router(num_workers, config, max_num_seqs=max_num_seqs)
        self.wait_s: dict[str, float] = {}
        self.refused: Counter[bytes] = Counter()
        self._ends: list[tuple[float, RequestId]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    def submit(self, name: str, tenant: bytes, service_s: float) -> None:
        self._tasks.append(asyncio.create_task(self._request(name, tenant, service_s)))

    async def _request(self, name: str, tenant: bytes, service_s: float) -> None:
        came_s = self.clock()
        try:
            await self.router.route(query(name, 160, tenant_hash=tenant))
        except OverloadedError:
            self.refused[tenant] += 1
            return
        self.wait_s[name] = self.clock() - came_s
        self.router.first_token(RequestId(name))
        self._ends.append((self.clock() + service_s, RequestId(name)))

    async def tick(self, seconds: float) -> None:
        await self.settle()
        self.clock.advance(seconds)
        for worker, _ in self.router.members():
            self.router.register(worker)  # a heartbeat
        for end_s, request_id in sorted(self._ends):
            if end_s <= self.clock():
                self._ends.remove((end_s, request_id))
                self.router.release(request_id)
        await self.settle()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_one_tenants_flood_does_not_delay_or_displace_another() -> None:
    """500 requests at once against one every second; a slot is free every 0.25 s."""
    config = RouterConfig(admission=AdmissionConfig(max_queued_requests=100))
    cluster = FakeCluster(num_workers=2, max_num_seqs=4, config=config)
    cluster.submit("quiet-before", b"quiet", 2.0)
    await cluster.tick(2.0)
    for number in range(500):
        cluster.submit(f"flood{number}", b"flood", 2.0)
    for second in range(20):
        cluster.submit(f"quiet{second}", b"quiet", 2.0)
        for _ in range(4):
            await cluster.tick(0.25)
    quiet = sorted(wait_s for name, wait_s in cluster.wait_s.items() if name.startswith("quiet"))
    flood = sorted(wait_s for name, wait_s in cluster.wait_s.items() if name.startswith("flood"))
    stats = cluster.router.stats()
    await cluster.close()
    assert cluster.refused[b"flood"] > 300  # the guarded thing is there: far more came than could wait
    assert cluster.refused[b"quiet"] == 0
    assert len(quiet) == 21
    assert quiet[-1] <= 2.0  # at most one service time, and that only before the flood was known for one
    assert flood[-1] > 10.0
    assert stats.num_reservations <= 2 * 6
    assert cluster.router.stats().num_queued == 0


async def test_equal_tenants_get_equal_service_while_both_wait() -> None:
    config = RouterConfig(admission=AdmissionConfig(max_queued_requests=1000))
    cluster = FakeCluster(num_workers=1, max_num_seqs=4, config=config)
    for number in range(200):
        cluster.submit(f"a{number}", b"a", 1.0)
    await cluster.settle()
    for number in range(50):
        cluster.submit(f"b{number}", b"b", 1.0)
    for _ in range(10):
        await cluster.tick(1.0)
    served = Counter(name[0] for name in cluster.wait_s)
    await cluster.close()
    assert served["b"] == pytest.approx(served["a"], abs=7)


class TestConfig:
    @pytest.mark.parametrize(
        ("kind", "values"),
        [
            (RouterConfig, {"heartbeat_ttl_s": 0}),
            (RouterConfig, {"congestion_per_s": -1}),
            (AdmissionConfig, {"max_queued_requests": -1}),
            (CircuitConfig, {"failure_threshold": 0}),
            (TenantLimits, {"weight": 0}),
            (TenantLimits, {"requests_per_min": 0}),
        ],
    )
    def test_errors_name_the_value_and_the_range(self, kind: type, values: dict[str, float]) -> None:
        (name, value), *_ = values.items()
        with pytest.raises(ValueError, match=rf"{name} is {value}, allowed are"):
            kind(**values)

    def test_unknown_settings_are_refused_and_nested_ones_read(self) -> None:
        with pytest.raises(ValueError, match="nonsense"):
            RouterConfig.from_dict({"nonsense": 1})
        assert RouterConfig.from_dict({"admission": {"max_queued_requests": 5}}).admission.max_queued_requests == 5
