"""Zero false alarms over tens of thousands of requests on the clean engine; may be interrupted and goes on later.

Runs in chunks of rounds, each on a fresh engine and a seed of its own, and keeps what is done in a JSON file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.experiment import state_file
from cluster.experiment.condition import Condition
from cluster.experiment.oracles import Oracle
from cluster.experiment.report_json import finding_record
from cluster.experiment.runner import run_experiment
from cluster.experiment.targets.weights import LoadedModel
from cluster.experiment.trial import fitted, make_target

MakeOracles = Callable[[LoadedModel, Condition], Sequence[Oracle]]


@dataclass(slots=True)
class LongRun:
    """State of a run. `findings` must stay empty."""

    seed: int
    num_chunks: int = 0
    num_requests: int = 0
    num_rounds: int = 0
    num_shared: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, seed: int) -> LongRun:
        """Goes on with what the file holds; starts afresh where there is none."""
        if not path.exists():
            return cls(seed)
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def save(self, path: Path) -> None:
        state_file.save(path, {name: getattr(self, name) for name in self.__dataclass_fields__})


async def continue_run(
    state: LongRun,
    path: Path,
    loaded: LoadedModel,
    conditions: Sequence[Condition],
    *,
    num_requests: int,
    rounds_per_chunk: int,
    make_oracles: MakeOracles,
    progress: Callable[[LongRun], None],
) -> LongRun:
    """One chunk after the other, the conditions in turn, until `num_requests` were answered or something was found."""
    while state.num_requests < num_requests and not state.findings:
        given = conditions[state.num_chunks % len(conditions)]
        plan = given.plan(state.seed + state.num_chunks, rounds_per_chunk)
        condition = fitted(loaded, given, plan)
        result = await run_experiment(
            make_target(loaded, condition),
            plan,
            oracles=make_oracles(loaded, condition),
            requirements=condition.requirements,
            condition=condition.name,
        )
        state.num_chunks += 1
        state.num_rounds += len(result.rounds)
        state.num_requests += sum(item.num_requests for item in result.rounds)
        state.num_shared += sum(bool(item.shared_step) for item in result.rounds)
        state.findings += [{"condition": condition.name, **finding_record(one)} for one in result.findings]
        state.save(path)
        progress(state)
    return state
