"""Properties of the policies, ours above all, on candidates made up by hand."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_builders import candidate

from cluster.api.ids import WorkerId
from router.policies.catalog import POLICIES, make_policy
from router.policies.threshold import AibrixPolicy, RayPrefixPolicy, SglangPolicy
from router.policies.watchword import WatchwordPolicy
from router.policy import Candidate, Placement

W = [WorkerId(f"w{n}") for n in range(8)]


def placement(tokens: int = 1600, affinity: WorkerId | None = None) -> Placement:
    return Placement(tokens, tokens // 16, 16, affinity)


def choices(policy_candidates: list[Candidate], matches: dict[WorkerId, int], **more: object) -> Counter[str]:
    policy = WatchwordPolicy()
    random = Random(1)
    asked = placement(**more)  # type: ignore[arg-type]
    return Counter(policy.choose(asked, policy_candidates, matches, random).worker_id for _ in range(200))


class TestWatchword:
    def test_equal_workers_share_equally(self) -> None:
        counts = choices([candidate(w) for w in W], {})
        assert set(counts) == set(W)

    def test_an_unknown_prefix_goes_to_the_least_loaded_in_tokens_not_in_requests(self) -> None:
        few_long = candidate("w0", pending_prefill_tokens=5000.0, num_running=1)
        many_short = candidate("w1", pending_prefill_tokens=500.0, num_running=5)
        assert set(choices([few_long, many_short], {})) == {"w1"}

    def test_a_slow_worker_gets_less(self) -> None:
        slow = candidate("w0", prefill_tokens_per_s=100.0)
        busy = candidate("w1", prefill_tokens_per_s=1000.0, pending_prefill_tokens=5000.0)
        assert set(choices([slow, busy], {})) == {"w1"}

    def test_waiting_for_the_holder_is_preferred_while_it_is_shorter_than_computing_again(self) -> None:
        for pending, expected in ((500.0, "w0"), (1500.0, "w0"), (6000.0, "w1")):
            holder = candidate("w0", pending_prefill_tokens=pending)
            assert set(choices([holder, candidate("w1")], {W[0]: 100})) == {expected}

    def test_at_equal_time_to_the_first_token_the_one_that_computes_less_is_preferred(self) -> None:
        holder = candidate("w0", pending_prefill_tokens=1599.0)  # 1599 + 1 in all
        assert set(choices([holder, candidate("w1")], {W[0]: 100})) == {"w0"}

    def test_full_slots_count_as_time(self) -> None:
        full = candidate("w0", slot_wait_s=3.0)
        assert set(choices([full, candidate("w1", pending_prefill_tokens=1000.0)], {})) == {"w1"}

    def test_affinity_is_honoured_within_its_slack_only(self) -> None:
        for pending, expected in ((50.0, {"w0"}), (500.0, {"w1"})):
            wanted = candidate("w0", pending_prefill_tokens=pending)
            assert set(choices([wanted, candidate("w1")], {}, affinity=W[0])) == expected
        assert "w7" not in choices([candidate("w0"), candidate("w1")], {}, affinity=W[7])

    @given(
        st.lists(
            st.tuples(st.floats(0, 1e6), st.integers(0, 50), st.integers(0, 100), st.floats(1, 1e5)),
            min_size=1,
            max_size=8,
        ),
        st.integers(0, 7),
    )
    def test_less_work_in_front_never_loses_a_worker_the_request(
        self, states: list[tuple[float, int, int, float]], which: int
    ) -> None:
        candidates = [
            candidate(w, pending_prefill_tokens=pending, num_running=running, prefill_tokens_per_s=rate)
            for w, (pending, running, _, rate) in zip(W, states, strict=False)
        ]
        matches = {w: matched for w, (_, _, matched, _) in zip(W, states, strict=False) if matched}
        chosen = WatchwordPolicy().choose(placement(), candidates, matches, Random(1))
        chosen.pending_prefill_tokens /= 2
        assert WatchwordPolicy().choose(placement(), candidates, matches, Random(1)) is chosen


class TestRivals:
    @pytest.mark.parametrize("name", POLICIES)
    def test_a_single_worker_is_chosen_and_none_outside_the_candidates(self, name: str) -> None:
        policy = make_policy(name)
        for number in range(1, 5):
            offered = [candidate(w, num_running=n) for n, w in enumerate(W[:number])]
            assert policy.choose(placement(), offered, {W[7]: 50}, Random(number)) in offered

    def test_an_unknown_name_is_told_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match="watchword"):
            make_policy("nobody")

    def test_ray_follows_the_prefix_whatever_the_load(self) -> None:
        offered = [candidate("w0", num_running=1000), candidate("w1")]
        assert RayPrefixPolicy().choose(placement(), offered, {W[0]: 10}, Random(1)).worker_id == "w0"
        fewest = [candidate("w0", num_cached_blocks=5), candidate("w1", num_cached_blocks=4, num_running=9)]
        assert RayPrefixPolicy().choose(placement(), fewest, {W[0]: 9}, Random(1)).worker_id == "w1"

    def test_sglang_leaves_the_prefix_when_both_thresholds_are_passed(self) -> None:
        for running, expected in ((64, "w0"), (65, "w1")):
            offered = [candidate("w0", num_running=running), candidate("w1")]
            assert SglangPolicy().choose(placement(), offered, {W[0]: 31}, Random(1)).worker_id == expected
        offered = [candidate("w0", num_running=1), candidate("w1")]
        assert SglangPolicy().choose(placement(), offered, {W[0]: 30}, Random(1)).worker_id == "w1"

    def test_aibrix_skips_holders_above_the_mean_plus_a_deviation(self) -> None:
        offered = [candidate("w0", num_running=6)] + [candidate(w, num_running=1) for w in W[1:]]
        assert AibrixPolicy().choose(placement(), offered, {W[0]: 50, W[3]: 10}, Random(1)).worker_id == "w3"
