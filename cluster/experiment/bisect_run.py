"""From a contaminated run to a component's name: bisection of its recorded arrivals, and what the rules make of it."""

from __future__ import annotations

from dataclasses import replace

from cluster.experiment.bisect import PREFIX_CACHE, Bisection, bisect, cleared_by, switches
from cluster.experiment.condition import Condition
from cluster.experiment.locate import Evidence, locate
from cluster.experiment.neighbours import depends_on_neighbours
from cluster.experiment.runner import ExperimentResult, run_experiment
from cluster.experiment.targets.embedded import EmbeddedTarget
from cluster.experiment.targets.solo import SoloEngine
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.targets.weights import LoadedModel
from cluster.experiment.trial import make_oracles, make_target
from workers.config import EngineConfig


async def bisect_run(
    loaded: LoadedModel, condition: Condition, result: ExperimentResult, parts: StackParts | None, *, is_exact: bool
) -> Bisection:
    """`result` has findings. Without the exactness oracle a switch needs enough clean rounds for the rate seen."""
    oracles = make_oracles(loaded, condition, is_exact=is_exact)

    async def run_with(config: EngineConfig) -> ExperimentResult:
        target = EmbeddedTarget(loaded, config, parts, with_template=condition.with_template)
        return await run_experiment(target, result.plan, oracles=oracles, requirements=condition.requirements)

    rate = result.verdict.any_rate.value
    trials = await bisect(condition.engine, switches(), run_with, seen_rate=rate, is_replay_exact=is_exact)
    cleared = cleared_by(trials)
    depends = await _depends_on_neighbours(loaded, condition, result, parts, cleared)
    return Bisection(tuple(trials), locate(Evidence(result.findings, cleared, condition.engine.layout, depends)))


async def _depends_on_neighbours(
    loaded: LoadedModel,
    condition: Condition,
    result: ExperimentResult,
    parts: StackParts | None,
    cleared: frozenset[str],
) -> bool | None:
    wrong = next((finding for finding in result.findings if finding.kind == "logits"), None)
    if wrong is None:
        return None
    # Other content hits other prefixes: where the cache is not to blame, it is kept from changing the steps.
    quiet = replace(
        condition, engine=replace(condition.engine, prefix_caching=PREFIX_CACHE in cleared), restart_every=None
    )
    solo = SoloEngine(loaded, condition.engine, with_template=condition.with_template)
    return await depends_on_neighbours(lambda: make_target(loaded, quiet, parts), result.plan, wrong, solo)
