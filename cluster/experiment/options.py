"""The options of `watchword experiment`, and what they say is to be run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.api.errors import InvalidRequestError
from cluster.experiment.plan import Plan, make_plan
from cluster.experiment.replay import read_plan, write_plan
from cluster.experiment.verdict import Requirements
from cluster.experiment.wordings import wordings_named
from cluster.experiment.workload import Workload


@dataclass(frozen=True, slots=True)
class ExperimentOptions:
    """As given on the command line; see cluster/experiment/cli.py."""

    url: str | None = None
    api_key: str | None = None
    rounds: int = 50
    model: str | None = None
    wording: str = "system-last,confirmed"
    seed: int | None = None
    replay: Path | None = None
    record: Path | None = None
    exact: bool = True
    matrix: bool = False
    bisect: bool = False
    planted: str | None = None
    fault: str | None = None
    timing: bool = False
    requests: int | None = None
    state_file: Path | None = None
    chinese_must_obey: bool = False
    json_file: Path | None = None
    html_file: Path | None = None
    events_file: Path | None = None

    @property
    def requirements(self) -> Requirements:
        return Requirements(chinese_must_obey=self.chinese_must_obey)


def workload_of(options: ExperimentOptions) -> Workload:
    """Raises InvalidRequestError for an unknown wording."""
    try:
        return Workload(wordings=tuple(wording.name for wording in wordings_named(options.wording)))
    except ValueError as error:
        raise InvalidRequestError(str(error), param="wording") from None


def plan_of(options: ExperimentOptions, seed: int) -> Plan:
    """The recorded plan, or a fresh one; written to a file where that was asked for."""
    plan = read_plan(options.replay) if options.replay else make_plan(seed, options.rounds, workload_of(options))
    if options.record is not None:
        write_plan(options.record, plan)
    return plan
