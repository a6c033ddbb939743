"""Runs conditions on engines in this process."""

from __future__ import annotations

from cache_service.prefix_index import InMemoryPrefixIndex
from cluster.experiment.condition import Condition, fit_pool
from cluster.experiment.oracles import ExactnessOracle, Oracle, StructureOracle
from cluster.experiment.plan import Plan
from cluster.experiment.reuse_oracle import ReuseOracle
from cluster.experiment.targets.embedded import ALARM_COUNTERS, EmbeddedTarget
from cluster.experiment.targets.indexed_group import STALE_HITS, IndexedGroup
from cluster.experiment.targets.solo import SoloEngine
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.targets.target import Target
from cluster.experiment.targets.weights import LoadedModel
from cluster.experiment.targets.worker_group import WorkerGroup


def fitted(loaded: LoadedModel, condition: Condition, plan: Plan) -> Condition:
    """The condition with a pool that fits the plan's prompts."""
    size = condition.engine.block_size
    by_round = [sum(loaded.num_blocks_of(request, size) for request in planned.requests) for planned in plan.rounds]
    return fit_pool(condition, by_round)


def make_target(loaded: LoadedModel, condition: Condition, parts: StackParts | None = None) -> Target:
    if condition.num_workers == 1 and condition.restart_every is None:
        return EmbeddedTarget(loaded, condition.engine, parts, with_template=condition.with_template)
    targets = [
        EmbeddedTarget(loaded, condition.engine, parts, with_template=condition.with_template)
        for _ in range(condition.num_workers)
    ]
    if condition.has_index:
        return IndexedGroup(targets, condition.restart_every, parts.index if parts else InMemoryPrefixIndex)
    return WorkerGroup(targets, condition.restart_every)


def make_oracles(loaded: LoadedModel, condition: Condition, *, is_exact: bool = True) -> list[Oracle]:
    """Structure and counters always; exactness costs one solo run per request."""
    oracles: list[Oracle] = [StructureOracle(ALARM_COUNTERS | {STALE_HITS}), ReuseOracle()]
    return (
        [*oracles, ExactnessOracle(SoloEngine(loaded, condition.engine, with_template=condition.with_template))]
        if is_exact
        else oracles
    )
