"""Placement by a gateway on its own."""

from __future__ import annotations

from collections import Counter

import pytest
from router_builders import ManualClock, query, worker_info

from cluster.api.errors import UnavailableError
from cluster.api.ids import RequestId, WorkerId
from router.fallback import FallbackConfig, FallbackRouter


def make_fallback(num_workers: int = 4, clock: ManualClock | None = None) -> FallbackRouter:
    fallback = FallbackRouter(clock=clock or ManualClock())
    fallback.update([worker_info(f"w{n}") for n in range(num_workers)])
    return fallback


def worker_of(fallback: FallbackRouter, user: str, request: str = "r") -> str:
    decision = fallback.route(query(request, user_hash=user.encode()))
    fallback.release(RequestId(request))
    return decision.worker_id


def test_every_gateway_sends_a_user_to_the_same_worker_and_users_spread() -> None:
    one, other = make_fallback(), make_fallback()
    placed = {f"user{n}": worker_of(one, f"user{n}") for n in range(400)}
    assert placed == {user: worker_of(other, user) for user in placed}
    counts = Counter(placed.values())
    assert len(counts) == 4
    assert max(counts.values()) < 2 * min(counts.values())


def test_a_lost_worker_moves_only_its_own_users() -> None:
    fallback = make_fallback()
    before = {f"user{n}": worker_of(fallback, f"user{n}") for n in range(200)}
    fallback.update([worker_info(f"w{n}") for n in (0, 1, 3)])
    for user, worker_id in before.items():
        after = worker_of(fallback, user)
        assert after == worker_id if worker_id != "w2" else after != "w2"


def test_no_worker_takes_more_than_its_share_of_one_users_burst() -> None:
    fallback = make_fallback()
    counts = Counter(fallback.route(query(f"r{n}")).worker_id for n in range(100))
    assert max(counts.values()) <= 1.25 * 100 / 4 + 1
    assert min(counts.values()) > 0


def test_places_come_back_once_and_a_repeated_request_holds_one() -> None:
    fallback = make_fallback(1)
    for _ in range(3):
        fallback.route(query("r"))
    assert fallback.num_running(WorkerId("w0")) == 1
    for _ in range(3):
        fallback.release(RequestId("r"))
    assert fallback.num_running(WorkerId("w0")) == 0


def test_a_failed_life_is_left_alone_for_a_while_another_life_is_not() -> None:
    clock = ManualClock()
    fallback = make_fallback(1, clock)
    fallback.worker_failed(WorkerId("w0"), "e1")
    with pytest.raises(UnavailableError):
        fallback.route(query("r"))
    fallback.update([worker_info("w0", "e2")])
    assert fallback.route(query("r")).epoch == "e2"
    fallback.update([worker_info("w0", "e1")])
    clock.advance(6)
    assert fallback.route(query("r")).epoch == "e1"


def test_excluded_and_unequal_workers_are_not_used() -> None:
    fallback = make_fallback(2)
    assert fallback.route(query("a", excluded=(WorkerId("w0"),))).worker_id == "w1"
    with pytest.raises(UnavailableError):
        fallback.route(query("b", numerics="other"))
    with pytest.raises(UnavailableError):
        fallback.route(query("c", num_prompt_tokens=1_000_000, block_keys=()))


@pytest.mark.parametrize("values", [{"load_factor": 1.0}, {"points_per_worker": 0}, {"cooldown_s": -1.0}])
def test_settings_are_checked(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="allowed are"):
        FallbackConfig(**values)  # type: ignore[arg-type]
