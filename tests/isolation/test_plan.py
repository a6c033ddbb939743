"""A plan is a function of its seed, survives a recording, and holds what the workload asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.experiment.plan import Plan, make_plan
from cluster.experiment.wordings import WORDINGS, wordings_named
from cluster.experiment.workload import Workload


def test_same_seed_same_plan_and_other_seed_other_markers() -> None:
    first, again, other = (make_plan(seed, 3, Workload()) for seed in (1, 1, 2))
    assert first == again
    assert not markers(first) & markers(other)


def test_recorded_plan_is_replayed_exactly() -> None:
    plan = make_plan(4, 3, Workload(mixed_sampling=True, abort_fraction=1.0, num_turns=3, context_words=(4, 9)))
    assert Plan.from_json(plan.to_json()) == plan


def test_every_request_has_its_own_marker_and_carries_it() -> None:
    plan = make_plan(1, 10, Workload(concurrency=4))
    requests = [request for planned in plan.rounds for request in planned.requests]
    assert len({request.marker for request in requests}) == len({request.name for request in requests}) == 60
    assert all(request.marker in str(request.messages) for request in requests)


def test_fillers_arrive_first_and_outlive_the_arrival_of_the_marked() -> None:
    for planned in make_plan(1, 5, Workload()).rounds:
        *fillers, first, second = planned.requests
        assert [request.is_marked for request in planned.requests] == [False, False, True, True]
        assert max(filler.arrival_step for filler in fillers) < first.arrival_step < second.arrival_step
        assert all(filler.max_tokens > second.arrival_step for filler in fillers)


def test_a_leak_between_two_users_and_within_one_user_can_both_show() -> None:
    same = [len({request.user for request in planned.marked}) == 1 for planned in make_plan(1, 6, Workload()).rounds]
    assert same == [False, True] * 3


@pytest.mark.parametrize("similarity", [0.0, 0.5, 1.0])
def test_prefix_similarity_is_the_share_of_common_leading_words(similarity: float) -> None:
    load = Workload(context_words=(40, 40), prefix_similarity=similarity, wordings=("system-last",))
    first, second = make_plan(1, 1, load).rounds[0].marked
    words = [str(request.messages[0][1]).split() for request in (first, second)]
    common = next(index for index, (mine, other) in enumerate(zip(*words, strict=True)) if mine != other)
    assert common >= 40 * similarity
    assert similarity == 1.0 or common < 40 * similarity + 5


def test_length_gap_and_turns_and_aborts() -> None:
    load = Workload(context_words=(0, 1000), num_turns=4, abort_fraction=1.0)
    planned = make_plan(1, 1, load).rounds[0]
    first, second = planned.marked
    assert len(str(second.messages)) > 4000 > len(str(first.messages))
    assert len(first.messages) >= 2 + 2 * 3
    assert all(request.abort_after_tokens for request in planned.requests if not request.is_marked)
    assert not any(request.abort_after_tokens for request in planned.marked)


@pytest.mark.parametrize("wrong", [{"concurrency": 1}, {"prefix_similarity": 1.5}, {"wordings": ("shout",)}])
def test_impossible_workloads_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="wanted"):
        replace(Workload(), **wrong)


def test_wordings_by_name() -> None:
    assert wordings_named("all") == tuple(WORDINGS.values())
    assert [wording.name for wording in wordings_named("original, zh-confirmed")] == ["original", "zh-confirmed"]
    with pytest.raises(ValueError, match="unknown wording"):
        wordings_named("original,nonsense")


def markers(plan: Plan) -> set[str]:
    return {request.marker for planned in plan.rounds for request in planned.requests}


def test_every_round_holds_every_region_so_that_two_spellings_of_one_meet() -> None:
    regions = ("north", "North", "south")
    for planned in make_plan(7, 4, Workload(concurrency=3, num_fillers=0, regions=regions)).rounds:
        assert {request.region for request in planned.requests} == set(regions)
