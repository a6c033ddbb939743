"""The experiment on the real small model: it repeats its own markers, the clean engine is clean under all oracles, and
with the original fault planted the same seeds show foreign markers."""

from __future__ import annotations

import pytest

from cluster.experiment.condition import baseline
from cluster.experiment.faults.packing import SeesRowBefore
from cluster.experiment.plan import make_plan
from cluster.experiment.runner import ExperimentResult, run_experiment
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.targets.weights import LoadedModel, load_model
from cluster.experiment.trial import fitted, make_oracles, make_target
from cluster.experiment.verdict import Status
from cluster.experiment.workload import Workload

pytestmark = [pytest.mark.weights, pytest.mark.timeout(900)]  # half a minute of arithmetic, on an idle machine

PLAN = make_plan(7, 6, Workload())


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model()


async def run(loaded: LoadedModel, parts: StackParts | None = None, *, is_exact: bool) -> ExperimentResult:
    condition = fitted(loaded, baseline(PLAN.workload), PLAN)
    oracles = make_oracles(loaded, condition, is_exact=is_exact)
    return await run_experiment(make_target(loaded, condition, parts), PLAN, oracles=oracles)


async def test_clean_engine_is_clean(smollm2: LoadedModel) -> None:
    result = await run(smollm2, is_exact=True)
    assert result.verdict.status is Status.CLEAN, result.verdict.reasons
    assert result.verdict.own_rate["en"].value >= 0.9
    assert all(found.shared_step for found in result.rounds)


async def test_packed_prompts_without_a_mask_leak_markers_on_the_same_seeds(smollm2: LoadedModel) -> None:
    result = await run(smollm2, StackParts(wrap_runner=SeesRowBefore), is_exact=False)
    assert result.verdict.status is Status.CONTAMINATED
    assert result.verdict.marker_rate.hits >= 2
