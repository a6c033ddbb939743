"""One switch at a time; enough rounds or a decisive replay, else undecided; and rules that name the component."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from scripted_target import ScriptedTarget, leaky, obedient

from cluster.experiment.bisect import (
    ALONE,
    BATCHING,
    LAYOUT,
    PREFIX_CACHE,
    PRESSURE,
    Outcome,
    bisect,
    cleared_by,
    switches,
)
from cluster.experiment.component import Component
from cluster.experiment.finding import Finding, OracleName
from cluster.experiment.locate import Evidence, locate
from cluster.experiment.plan import make_plan
from cluster.experiment.reuse_oracle import FOREIGN_REUSE
from cluster.experiment.runner import ExperimentResult, run_experiment
from cluster.experiment.workload import Workload
from workers.config import Batching, EngineConfig, Layout

BASE = EngineConfig(num_blocks=64, max_model_len=512)


def contaminated_when(is_bad: Callable[[EngineConfig], bool], num_rounds: int = 12):
    async def run_with(config: EngineConfig) -> ExperimentResult:
        target = ScriptedTarget(leaky if is_bad(config) else obedient)
        return await run_experiment(target, make_plan(1, num_rounds, Workload()))

    return run_with


async def test_the_switch_that_clears_it_is_found() -> None:
    trials = await bisect(
        BASE, switches(), contaminated_when(lambda config: config.prefix_caching), seen_rate=0.33, is_replay_exact=False
    )
    assert cleared_by(trials) == {PREFIX_CACHE}
    assert [trial.outcome for trial in trials[1:]] == [Outcome.STILL] * 3


async def test_too_few_clean_rounds_are_undecided_unless_the_replay_is_exact() -> None:
    run_with = contaminated_when(lambda config: config.layout is Layout.PACKED)
    few = await bisect(BASE, switches(), run_with, seen_rate=0.06, is_replay_exact=False)
    assert {trial.outcome for trial in few} == {Outcome.STILL, Outcome.UNDECIDED}
    exact = await bisect(BASE, switches(), run_with, seen_rate=0.06, is_replay_exact=True)
    assert cleared_by(exact) == {LAYOUT}


async def test_two_causes_are_cleared_cumulatively() -> None:
    def is_bad(config: EngineConfig) -> bool:
        return config.prefix_caching or config.batching is Batching.CONTINUOUS

    trials = await bisect(BASE, switches(), contaminated_when(is_bad), seen_rate=0.33, is_replay_exact=True)
    assert not cleared_by(trials)
    assert trials[-1].switches == (PREFIX_CACHE, BATCHING)
    assert trials[-1].outcome is Outcome.CLEARED


async def test_what_nothing_clears_stays() -> None:
    trials = await bisect(
        BASE, switches(256), contaminated_when(lambda config: True), seen_rate=1, is_replay_exact=True
    )
    assert not cleared_by(trials)
    assert trials[-1].switches == (PREFIX_CACHE, BATCHING, LAYOUT, ALONE, PRESSURE)
    assert {trial.outcome for trial in trials} == {Outcome.STILL}


def crossed(boundary: str) -> Finding:
    return Finding(OracleName.STRUCTURE, FOREIGN_REUSE, 0, "r0.A", "", {"boundary": boundary})


def found(oracle: OracleName, kind: str, detail: str = "") -> Finding:
    return Finding(oracle, kind, 0, "r0.A", detail)


EXACT, STRUCTURE, COUNTER = OracleName.EXACTNESS, OracleName.STRUCTURE, OracleName.COUNTER


@pytest.mark.parametrize(
    ("findings", "cleared", "depends", "component"),
    [
        ([found(EXACT, "logits")], {LAYOUT, ALONE}, True, Component.LAYOUT_MASK),
        ([found(EXACT, "logits")], {LAYOUT, ALONE}, False, Component.POSITIONS),
        ([found(EXACT, "logits")], {LAYOUT, ALONE}, None, None),
        ([found(EXACT, "logits")], {PREFIX_CACHE}, None, Component.PREFIX_CACHE),
        ([found(EXACT, "logits")], {PREFIX_CACHE, PRESSURE}, None, Component.SCHEDULER),
        ([found(EXACT, "choice")], set(), None, Component.SAMPLER),
        ([found(EXACT, "length")], {PRESSURE}, None, Component.SCHEDULER),
        ([found(EXACT, "text")], set(), None, Component.DETOKENIZER),
        ([found(EXACT, "delivery")], set(), None, Component.STREAM),
        ([found(EXACT, "logits"), found(STRUCTURE, "content")], {PREFIX_CACHE}, True, Component.KEY),
        ([found(STRUCTURE, "foreign")], {PREFIX_CACHE}, None, Component.KEY),
        ([found(STRUCTURE, "content")], {PREFIX_CACHE, PRESSURE}, None, Component.BLOCK_POOL),
        ([found(STRUCTURE, "foreign")], set(), None, Component.BLOCK_POOL),
        ([found(STRUCTURE, "unwritten")], set(), None, Component.SCHEDULER),
        ([found(STRUCTURE, "reused"), found(COUNTER, "checksum_failures")], set(), None, Component.BLOCK_POOL),
        ([found(COUNTER, "checksum_failures")], set(), None, Component.BLOCK_POOL),
        ([found(COUNTER, "checksum_failures")], {ALONE}, None, Component.LAYOUT_MASK),
        ([found(COUNTER, "verify_failures")], set(), None, Component.KEY),
        ([found(COUNTER, "verify_failures")], {PRESSURE}, None, Component.PREFIX_CACHE),
        ([found(COUNTER, "index_stale_hits")], set(), None, Component.INDEX),
        ([crossed("session")], {PREFIX_CACHE}, None, Component.SESSION),
        ([crossed("session"), found(STRUCTURE, "foreign")], {PREFIX_CACHE}, None, Component.SESSION),
        ([crossed("session"), crossed("user")], {PREFIX_CACHE}, None, Component.KEY),
        ([crossed("user")], {PREFIX_CACHE}, None, Component.KEY),
        ([found(OracleName.MARKER, "foreign_marker")], {LAYOUT}, None, None),
    ],
)
def test_component_follows_from_the_evidence(
    findings: list[Finding], cleared: set[str], depends: bool | None, component: Component | None
) -> None:
    evidence = Evidence(tuple(findings), frozenset(cleared), Layout.PACKED, depends)
    assert locate(evidence) is component


def test_what_only_the_padded_layout_shows_is_padding() -> None:
    evidence = Evidence((found(EXACT, "logits"),), frozenset({LAYOUT, ALONE}), Layout.PADDED, None)
    assert locate(evidence) is Component.LAYOUT_MASK
    assert locate(replace(evidence, layout=Layout.PACKED)) is None
