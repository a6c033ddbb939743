"""Every condition of the matrix is clean under all oracles, and shows what it is there to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.experiment.condition import Condition
from cluster.experiment.matrix import matrix
from cluster.experiment.runner import ExperimentResult, run_experiment
from cluster.experiment.targets.weights import LoadedModel
from cluster.experiment.trial import fitted, make_oracles, make_target
from cluster.experiment.verdict import Status
from cluster.experiment.workload import Workload

NUM_ROUNDS = 4
# The tiny model's tokens are bytes: a word is six of them.
CONDITIONS = matrix(Workload(max_tokens=12, filler_max_tokens=20), long_words=150)
BY_NAME = {condition.name: condition for condition in CONDITIONS}


async def run(loaded: LoadedModel, condition: Condition) -> ExperimentResult:
    requirements = replace(condition.requirements, own_marker=False)
    plan = condition.plan(1, NUM_ROUNDS)
    condition = fitted(loaded, condition, plan)
    return await run_experiment(
        make_target(loaded, condition),
        plan,
        oracles=make_oracles(loaded, condition),
        requirements=requirements,
        condition=condition.name,
    )


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
async def test_condition_is_clean(tiny: LoadedModel, condition: Condition) -> None:
    result = await run(tiny, condition)
    assert result.verdict.status is Status.CLEAN, result.verdict.reasons
    assert all(found.shared_step for found in result.rounds)


async def test_pressure_is_real(tiny: LoadedModel) -> None:
    evicting = await run(tiny, BY_NAME["pool pressure: evictions"])
    preempting = await run(tiny, BY_NAME["pool pressure: preemptions"])
    assert sum(found.num_evictions or 0 for found in evicting.rounds) > 10
    assert sum(found.num_preemptions or 0 for found in preempting.rounds) > 3


async def test_pressure_that_does_not_come_voids(tiny: LoadedModel) -> None:
    condition = BY_NAME["pool pressure: preemptions"]
    roomy = replace(condition, engine=replace(condition.engine, num_blocks=1024))
    result = await run(tiny, roomy)
    assert result.verdict.status is Status.VOID
    assert names(result.verdict.reasons) == {"evicted", "preempted"}


def names(reasons: Sequence[str]) -> set[str]:
    return {word for reason in reasons for word in ("evicted", "preempted") if word in reason}


def test_matrix_covers_what_it_promises() -> None:
    wanted = (
        "lengths",
        "similarity 0",
        "similarity 100",
        "concurrency 64",
        "evictions",
        "preemptions",
        "abort",
        "mixed",
    )
    wanted += (
        "all streaming",
        "none streaming",
        "multi-turn",
        "two workers",
        "restart",
        "template",
        "padded",
        "static",
    )
    assert all(any(part in name for name in BY_NAME) for part in wanted)
    assert len(BY_NAME) == len(CONDITIONS)
