"""What is known of planted faults so far, in a file: a run over all of them may be interrupted and goes on later."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.api.errors import InvalidRequestError
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
    def load(cls, path: Path | None, model: str, seed: int | None, num_rounds: int, fresh_seed: int) -> PlantedState:
        """Goes on with what the file holds; `seed` None takes the file's, or `fresh_seed` where there is no file.

        Raises InvalidRequestError when the file is of another run: its cases would not be comparable.
        """
        if path is None or not path.exists():
            return cls(model, fresh_seed if seed is None else seed, num_rounds, path)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            state = cls(record["model"], record["seed"], record["rounds"], path)
            state.cases = {name: _case_from(fields) for name, fields in record["cases"].items()}
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(f"{path} holds no run of planted faults", param="state") from None
        here = (model, state.seed if seed is None else seed, num_rounds)
        there = (state.model, state.seed, state.num_rounds)
        if here != there:
            raise InvalidRequestError(
                f"{path} holds a run of model {there[0]}, seed {there[1]}, {there[2]} rounds; asked for was model "
                f"{here[0]}, seed {here[1]}, {here[2]} rounds",
                param="state",
            )
        return state

    def add(self, name: str, case: Case) -> None:
        """Kept at once; the file is replaced in one go, so that an interruption never leaves half of it."""
        self.cases[name] = case
        if self.path is None:
            return
        record = {
            "model": self.model,
            "seed": self.seed,
            "rounds": self.num_rounds,
            "cases": {name: _record(case) for name, case in self.cases.items()},
        }
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(record, indent=1), encoding="utf-8")
        draft.replace(self.path)


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
