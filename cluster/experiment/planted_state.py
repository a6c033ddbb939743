"""What is known of planted faults so far, in a file: a run over all of them may be interrupted and goes on later."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.experiment import state_file
from cluster.experiment.component import Component
from cluster.experiment.finding import OracleName
from cluster.experiment.planted import Case


@dataclass(slots=True)
class PlantedState:
    """Cases of one model, seed and number of rounds. `path` None keeps them in memory only."""

    model: str
    seed: int
    num_rounds: int
    path: Path | None = None
    cases: dict[str, Case] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None, model: str, seed: int, num_rounds: int) -> PlantedState:
        """Goes on with what the file holds. Raises InvalidRequestError when that is another run's."""
        state = cls(model, seed, num_rounds, path)
        if path is not None and path.exists():
            record = state_file.load(path, state._run())
            state.cases = {name: _case_from(fields) for name, fields in record["cases"].items()}
        return state

    def add(self, name: str, case: Case) -> None:
        """Kept at once."""
        self.cases[name] = case
        if self.path is not None:
            cases = {name: _record(case) for name, case in self.cases.items()}
            state_file.save(self.path, {**self._run(), "cases": cases})

    def _run(self) -> dict[str, Any]:
        return {"model": self.model, "seed": self.seed, "rounds": self.num_rounds}


def _record(case: Case) -> dict[str, Any]:
    return {
        "found_by": None if case.found_by is None else case.found_by.value,
        "requests": case.requests,
        "named": None if case.named is None else case.named.value,
        "stage": case.stage,
        "oracles": sorted(oracle.value for oracle in case.oracles),
    }


def _case_from(fields: dict[str, Any]) -> Case:
    return Case(
        found_by=None if fields["found_by"] is None else OracleName(fields["found_by"]),
        requests=fields["requests"],
        named=None if fields["named"] is None else Component(fields["named"]),
        stage=fields["stage"],
        oracles=frozenset(map(OracleName, fields["oracles"])),
    )
