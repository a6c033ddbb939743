"""Clean, contaminated or void: each verdict, and each of the reasons that void a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_target import ScriptedTarget, leaky, obedient, silent

from cluster.experiment.observation import Observation, Violation
from cluster.experiment.oracles import StructureOracle
from cluster.experiment.plan import PlannedRequest, Round, make_plan
from cluster.experiment.runner import ExperimentResult, run_experiment
from cluster.experiment.targets.target import ReuseControl
from cluster.experiment.verdict import Requirements, Status
from cluster.experiment.workload import Workload

STRUCTURE = StructureOracle(frozenset({"verify_failures"}))


async def run(target: ScriptedTarget, requirements: Requirements | None = None, **load: object) -> ExperimentResult:
    plan = make_plan(1, 12, replace(Workload(), **load))
    return await run_experiment(target, plan, oracles=[STRUCTURE], requirements=requirements)


async def test_obedient_and_isolated_is_clean() -> None:
    result = await run(ScriptedTarget(obedient))
    assert result.verdict.status is Status.CLEAN
    assert result.verdict.own_rate["en"].value == 1
    assert not any(found.a_in_b or found.b_in_a for found in result.rounds)


async def test_leak_is_counted_by_round_and_direction() -> None:
    result = await run(ScriptedTarget(leaky))
    assert result.verdict.status is Status.CONTAMINATED
    assert [found.index for found in result.rounds if found.a_in_b] == [0, 3, 6, 9]
    assert not any(found.b_in_a for found in result.rounds)
    assert result.verdict.marker_rate.hits == 4
    assert result.verdict.marker_rate.low < 4 / 12 < result.verdict.marker_rate.high


async def test_marker_of_a_request_long_finished_is_found() -> None:
    earlier: list[str] = []

    def answer(request: PlannedRequest, planned: Round) -> Observation:
        earlier.append(request.marker)
        old = earlier[0] if planned.index == 11 else ""
        return Observation(request.name, text=f"{request.marker} {old}")

    result = await run(ScriptedTarget(answer))
    assert {finding.evidence["owner"] for finding in result.findings} == {"r0.filler0"}


@pytest.mark.parametrize("where", ["logprob_texts", "error"])
async def test_leak_in_logprobs_or_error_text_counts(where: str) -> None:
    def answer(request: PlannedRequest, planned: Round) -> Observation:
        partner = planned.marked[0].marker if request.role == "B" else ""
        hidden = {"error": f"cannot read {partner}"} if where == "error" else {"logprob_texts": ("a", partner)}
        return Observation(request.name, text=request.marker, **hidden)

    result = await run(ScriptedTarget(answer))
    assert result.verdict.status is Status.CONTAMINATED
    assert result.verdict.marker_rate.hits == 12


async def test_missing_own_marker_voids_english_and_not_chinese() -> None:
    assert (await run(ScriptedTarget(silent))).verdict.status is Status.VOID
    chinese = {"wordings": ("zh-confirmed",)}
    assert (await run(ScriptedTarget(silent), **chinese)).verdict.status is Status.CLEAN
    asked = Requirements(chinese_must_obey=True)
    assert (await run(ScriptedTarget(silent), asked, **chinese)).verdict.status is Status.VOID


@pytest.mark.parametrize(("shared", "status"), [(11, Status.CLEAN), (10, Status.VOID), (None, Status.VOID)])
async def test_too_few_shared_steps_void(shared: int | None, status: Status) -> None:
    target = ScriptedTarget(shared=lambda index: None if shared is None else index < shared)
    assert (await run(target)).verdict.status is status


async def test_failed_reuse_control_voids_only_when_reuse_was_expected() -> None:
    assert (await run(ScriptedTarget(reuse=ReuseControl(0, expected=True)))).verdict.status is Status.VOID
    assert (await run(ScriptedTarget(reuse=ReuseControl(0, expected=False)))).verdict.status is Status.CLEAN
    assert (await run(ScriptedTarget(reuse=ReuseControl(None, expected=True)))).verdict.status is Status.CLEAN


async def test_pressure_voids_unless_it_was_wanted() -> None:
    target = ScriptedTarget(num_evictions=1)
    assert (await run(target)).verdict.status is Status.VOID
    assert (await run(target, Requirements(allow_pressure=True))).verdict.status is Status.CLEAN


async def test_structure_and_counters_are_contamination_without_any_marker() -> None:
    broken = Violation("foreign_block", "r0.A", 3, 7, "reads a block of another user")
    for target in (ScriptedTarget(violations=(broken,)), ScriptedTarget(counters={"verify_failures": 2})):
        verdict = (await run(target)).verdict
        assert verdict.status is Status.CONTAMINATED
        assert (verdict.marker_rate.hits, verdict.any_rate.hits) == (0, 12)
    assert (await run(ScriptedTarget(counters={"hits": 9}))).verdict.status is Status.CLEAN


async def test_a_leak_outweighs_a_void_run() -> None:
    target = ScriptedTarget(leaky, shared=lambda index: False)
    verdict = (await run(target)).verdict
    assert verdict.status is Status.CONTAMINATED
    assert any("shared a step" in reason for reason in verdict.reasons)
