"""Conditions that a run of the matrix has finished, in a file, so that it can be interrupted and go on later."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.experiment import state_file
from cluster.experiment.plan import Plan
from cluster.experiment.report_json import experiment_from_record, experiment_record
from cluster.experiment.runner import ExperimentResult


@dataclass(slots=True)
class MatrixState:
    """Results of one model, seed and number of rounds, by condition. `path` None keeps nothing."""

    model: str
    seed: int
    num_rounds: int
    path: Path | None = None
    records: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None, model: str, seed: int, num_rounds: int) -> MatrixState:
        """Goes on with what the file holds. Raises InvalidRequestError when that is another run's."""
        state = cls(model, seed, num_rounds, path)
        if path is not None and path.exists():
            state.records = state_file.load(path, state._run())["conditions"]
        return state

    def result(self, condition: str, plan: Plan) -> ExperimentResult | None:
        """None when the condition is still to be run."""
        record = self.records.get(condition)
        return None if record is None else experiment_from_record(record, plan)

    def add(self, result: ExperimentResult) -> None:
        self.records[result.condition] = experiment_record(result)
        if self.path is not None:
            state_file.save(self.path, {**self._run(), "conditions": self.records})

    def _run(self) -> dict[str, Any]:
        return {"model": self.model, "seed": self.seed, "rounds": self.num_rounds}
