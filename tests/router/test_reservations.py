"""Places on workers: idempotent, conserved, healed; and what a worker's load is estimated to be in between."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_builders import candidate, snapshot

from cluster.api.ids import RequestId
from router.reservations import Reservations
from router.worker_load import Reservation, WorkerLoad


def place(load: WorkerLoad, name: str, tokens: float = 1000, now_s: float = 0.0, tenant: bytes = b"t") -> Reservation:
    return Reservation(RequestId(name), load, tokens, int(tokens), tenant, now_s)


def make_load(**changes: object) -> WorkerLoad:
    return WorkerLoad(candidate("w0", **changes), "e1")


class TestEstimates:
    def test_the_oldest_prefill_advances_at_the_measured_rate_but_not_past_its_end(self) -> None:
        load = make_load(prefill_tokens_per_s=100.0)
        load.add(place(load, "a", 500, 0.0))
        load.add(place(load, "b", 300, 1.0))
        assert load.refresh(0.0).pending_prefill_tokens == 800
        assert load.refresh(2.0).pending_prefill_tokens == 600
        assert load.refresh(60.0).pending_prefill_tokens == 300  # else the first token of a would have come
        load.end_prefill(RequestId("a"), 60.0)
        assert load.refresh(61.0).pending_prefill_tokens == 200

    def test_a_report_takes_from_the_oldest_prefill_first(self) -> None:
        load = make_load(prefill_tokens_per_s=100.0)
        for name in "ab":
            load.add(place(load, name, 500, 0.0))
        load.heal(pending_prefill_tokens=600, alive=[RequestId("a"), RequestId("b")], num_foreign=0, now_s=10.0)
        assert [r.prefill_tokens for r in load.reservations.values()] == [100, 500]
        load.end_prefill(RequestId("a"), 10.5)
        assert load.refresh(10.5).pending_prefill_tokens == 500

    def test_a_request_on_its_way_is_not_hidden_by_a_report(self) -> None:
        load = make_load()
        load.add(place(load, "known", 500, 0.0))
        load.add(place(load, "under way", 700, 9.9))
        load.heal(pending_prefill_tokens=100, alive=[RequestId("known")], num_foreign=0, now_s=10.0)
        assert load.refresh(10.0).pending_prefill_tokens == 800
        load.check_integrity()

    def test_the_wait_for_a_slot_is_learned_from_how_long_requests_decode(self) -> None:
        load = make_load(max_num_seqs=2)
        for number in range(3):
            load.add(place(load, str(number), 10, 0.0))
        assert load.refresh(0.0).slot_wait_s == 0  # nothing is known yet
        load.reservations[RequestId("0")].first_token_s = 0.0
        load.remove(RequestId("0"), 8.0)
        assert load.refresh(8.0).slot_wait_s == pytest.approx(4.0)  # one of two slots is free after half of 8 s
        load.remove(RequestId("1"), 8.0)
        assert load.refresh(8.0).slot_wait_s == 0


class TestReservations:
    def test_the_same_request_holds_one_place(self) -> None:
        reservations, first, second = Reservations(5.0), make_load(), make_load()
        reservations.reserve(place(first, "r"))
        reservations.reserve(place(second, "r"))
        assert (first.candidate.num_running, second.candidate.num_running, len(reservations)) == (0, 1, 1)
        reservations.check_integrity()

    def test_a_request_released_after_the_report_was_taken_is_not_taken_for_anothers(self) -> None:
        reservations, load = Reservations(5.0), make_load()
        reservations.reserve(place(load, "r"))
        reservations.release(RequestId("r"), 10.0)
        reservations.heal(load, snapshot(request_ids=(RequestId("r"), RequestId("foreign"))), 10.1)
        assert load.candidate.num_running == 1
        reservations.heal(load, snapshot(request_ids=(RequestId("r"),)), 20.0)  # so late it is indeed there
        assert load.candidate.num_running == 1
        load.check_integrity()

    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 2)), max_size=60))
    def test_no_order_of_calls_leaks_or_counts_twice(self, calls: list[tuple[int, int, int]]) -> None:
        reservations = Reservations(5.0)
        loads = [make_load(), make_load(), make_load()]
        for now, (action, number, worker) in enumerate(calls):
            request_id, load, now_s = RequestId(str(number)), loads[worker], float(now)
            match action:
                case 0 | 1:
                    reservations.reserve(place(load, str(number), 100 + number, now_s))
                case 2:
                    reservations.first_token(request_id, now_s)
                case 3:
                    reservations.release(request_id, now_s)
                case 4:
                    alive = (*[r for r in load.reservations if int(r) % 2], RequestId("x"))
                    reservations.heal(load, snapshot(request_ids=alive, pending_prefill_tokens=130), now_s)
                case 5:
                    reservations.release_all(load, now_s)
            reservations.check_integrity()
            for each in loads:
                each.check_integrity()
                assert each.refresh(now_s).pending_prefill_tokens >= 0
        for load in loads:
            reservations.heal(load, snapshot(), 1e6)
            assert load.candidate.num_running == 0
            assert load.refresh(1e6).pending_prefill_tokens == 0
        assert len(reservations) == 0

    def test_sums_do_not_drift_over_a_million_tokens_of_fractions(self) -> None:
        random, reservations, load = Random(1), Reservations(5.0), make_load()
        for number in range(5000):
            reservations.reserve(place(load, str(number), random.random() * 1e4, float(number)))
            reservations.release(RequestId(str(max(0, number - random.randrange(5)))), float(number))
        load.check_integrity()
