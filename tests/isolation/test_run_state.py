"""Runs that take long keep what they have done, and go on from there; a file of another run is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_target import ScriptedTarget, leaky

from cluster.api.errors import InvalidRequestError
from cluster.experiment import state_file
from cluster.experiment.component import Component
from cluster.experiment.faults.catalog import GATE, planted_faults
from cluster.experiment.finding import OracleName
from cluster.experiment.matrix_state import MatrixState
from cluster.experiment.plan import make_plan
from cluster.experiment.planted import Case, investigate_blind
from cluster.experiment.planted_state import PlantedState
from cluster.experiment.report_json import experiment_from_record, experiment_record
from cluster.experiment.runner import ExperimentResult, run_experiment
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.timing import Samples
from cluster.experiment.verdict import Status
from cluster.experiment.workload import Workload

CASE = Case(OracleName.STRUCTURE, 12, Component.KEY, "baseline", frozenset({OracleName.STRUCTURE, OracleName.COUNTER}))
UNFOUND = Case(None, 0, None, None, frozenset())


class Interrupted(Exception):
    pass


class Detective:
    """Finds the same in every fault, and is interrupted after `num_cases`."""

    def __init__(self, num_cases: int) -> None:
        self.num_left = num_cases

    async def investigate(self, make_parts: object) -> Case:
        if not self.num_left:
            raise Interrupted
        self.num_left -= 1
        assert isinstance(make_parts(), StackParts)  # type: ignore[operator]
        return CASE


async def leaky_result(condition: str = "baseline") -> ExperimentResult:
    return await run_experiment(ScriptedTarget(leaky), make_plan(1, 4, Workload()), condition=condition)


async def test_planted_faults_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATE, "1")
    faults, path = planted_faults("all")[:5], tmp_path / "state.json"
    state = PlantedState.load(path, "tiny", 3, 2)
    with pytest.raises(Interrupted):
        await investigate_blind(Detective(2), faults, random.Random(3), state.add)
    again = PlantedState.load(path, "tiny", 3, 2)
    assert again.cases == state.cases
    assert len(again.cases) == 2
    left = [fault for fault in faults if fault.name not in again.cases]
    await investigate_blind(Detective(3), left, random.Random(3), again.add)
    assert PlantedState.load(path, "tiny", 3, 2).cases.keys() == {fault.name for fault in faults}


def test_cases_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    state = PlantedState.load(path, "tiny", 3, 2)
    state.add("one", CASE)
    state.add("two", UNFOUND)
    assert PlantedState.load(path, "tiny", 3, 2).cases == {"one": CASE, "two": UNFOUND}


@pytest.mark.parametrize("changed", [{"model": "other"}, {"seed": 4}, {"num_rounds": 3}])
def test_a_file_of_another_run_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    path = tmp_path / "state.json"
    state = PlantedState("tiny", 3, 2, path)
    state.add("one", CASE)
    other = replace(state, **changed)
    with pytest.raises(InvalidRequestError, match="asked for was"):
        PlantedState.load(path, other.model, other.seed, other.num_rounds)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": "tiny"}'])
def test_a_file_that_holds_no_run_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match="holds no"):
        PlantedState.load(path, "tiny", 3, 2)
    with pytest.raises(InvalidRequestError, match="holds no"):
        state_file.seed_of(path)


def test_the_seed_of_a_run_is_taken_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert state_file.seed_of(None) is None
    assert state_file.seed_of(path) is None
    PlantedState("tiny", 3, 2, path).add("one", CASE)
    assert state_file.seed_of(path) == 3


async def test_conditions_of_the_matrix_come_back_with_verdict_and_findings(tmp_path: Path) -> None:
    path, result = tmp_path / "state.json", await leaky_result("the condition")
    MatrixState.load(path, "tiny", 1, 4).add(result)
    again = MatrixState.load(path, "tiny", 1, 4)
    assert again.result("another", result.plan) is None
    known = again.result("the condition", result.plan)
    assert known is not None
    assert known.verdict.status is Status.CONTAMINATED
    assert known == result


async def test_a_record_holds_everything_but_the_plan() -> None:
    result = await leaky_result()
    record = json.loads(json.dumps(experiment_record(result)))
    assert experiment_from_record(record, result.plan) == result


def test_timed_pairs_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    samples = Samples.load(path, "tiny", 1)
    block = {"cold": 1.0, "foreign": 2.0, "own cold": 3.0, "own": 4.0}
    for _ in range(3):
        samples.add(block)
    again = Samples.load(path, "tiny", 1)
    assert again.num_pairs == 3
    assert again.arms == {arm: [seconds] * 3 for arm, seconds in block.items()}
