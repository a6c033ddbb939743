"""Every planted fault is found, and its component is named by a locator that knows nothing of it; a clean engine
raises no alarm in the same traffic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.api.errors import InvalidRequestError, PermissionDeniedError
from cluster.experiment.component import Component
from cluster.experiment.faults.catalog import GATE, planted_faults
from cluster.experiment.faults.fault import Fault
from cluster.experiment.faults.stages import make_stages
from cluster.experiment.finding import OracleName
from cluster.experiment.planted import Case, Investigator
from cluster.experiment.report_planted import confusion, invisible_to_marker, planted_record
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.targets.weights import LoadedModel

pytestmark = pytest.mark.timeout(900)  # up to a dozen experiments for each fault


@pytest.fixture(scope="module", autouse=True)
def open_gate() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(GATE, "1")
        yield


@pytest.fixture(scope="module")
def investigator(tiny: LoadedModel) -> Investigator:
    return Investigator(tiny, make_stages(tiny, seed=1, num_rounds=2, long_words=40))


def all_faults() -> tuple[Fault, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(GATE, "1")
        return planted_faults("all")


async def test_clean_engine_raises_no_alarm(investigator: Investigator) -> None:
    case = await investigator.investigate(StackParts)
    assert case.found_by is None


@pytest.mark.parametrize("fault", all_faults(), ids=lambda fault: fault.name)
async def test_fault_is_found_and_its_component_named(investigator: Investigator, fault: Fault) -> None:
    case = await investigator.investigate(fault.make_parts)
    assert case.found_by is not None
    assert case.requests > 0
    assert case.named is fault.component, (case, fault.what)


def test_there_are_enough_faults_of_enough_kinds() -> None:
    faults = all_faults()
    assert len({fault.name for fault in faults}) == len(faults) >= 20
    assert {fault.component for fault in faults} == set(Component)


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_planting_is_refused_unless_allowed(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GATE) if value is None else monkeypatch.setenv(GATE, value)
    with pytest.raises(PermissionDeniedError, match=GATE):
        planted_faults("all")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="mask_of_wrong_row"):
        planted_faults("no_such_fault")


async def test_a_fault_of_ones_own_can_be_passed_by_path(investigator: Investigator, tmp_path: Path) -> None:
    """Its class is unknown to the locator: here a step builder that draws every token with the wrong seed."""
    source = tmp_path / "mine.py"
    source.write_text(
        "from dataclasses import replace\n"
        "from cluster.experiment.component import Component\n"
        "from cluster.experiment.faults.fault import Fault\n"
        "from cluster.experiment.targets.stack import StackParts\n"
        "from workers.build import EngineParts\n"
        "from workers.step_builder import StepBuilder\n"
        "class Late(StepBuilder):\n"
        "    def build_samples(self, row):\n"
        "        return tuple(replace(s, position=s.position + 1) for s in super().build_samples(row))\n"
        "mine = Fault('mine', Component.SAMPLER, 'noise of the next position',\n"
        "             lambda: StackParts(engine=EngineParts(step_builder=Late)))\n"
    )
    (fault,) = planted_faults(f"{source}:mine")
    case = await investigator.investigate(fault.make_parts)
    assert case.named is Component.SAMPLER


def test_record_has_exactly_the_promised_fields() -> None:
    by_name = {fault.name: fault for fault in all_faults()}
    fault, other = by_name["mask_of_wrong_row"], by_name["table_of_wrong_row"]
    cases = {
        fault.name: Case(OracleName.EXACTNESS, 6, Component.LAYOUT_MASK, "s", frozenset({OracleName.EXACTNESS})),
        other.name: Case(None, 0, None, None, frozenset()),
    }
    record = json.loads(json.dumps(planted_record((fault, other), cases)))
    assert record["faults"][0] == {
        "name": "mask_of_wrong_row",
        "found_by": "exactness",
        "requests": 6,
        "component": "layout_mask",
        "component_named": "layout_mask",
    }
    assert record["faults"][1]["found_by"] is None
    assert record["invisible_to_marker"] == ["mask_of_wrong_row"]
    assert confusion((fault, other), cases) == {("layout_mask", "layout_mask"): 1, ("layout_mask", "undecided"): 1}
    assert invisible_to_marker(cases) == [fault.name]
