"""What `watchword experiment` does with its options: picks the kind of run, and writes the reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.api.errors import InvalidRequestError, UnavailableError
from cluster.experiment.bisect import Bisection
from cluster.experiment.event_file import BlockEvent, EventFile, write_events
from cluster.experiment.plan import Plan, make_plan
from cluster.experiment.replay import draw_seed, read_plan, write_plan
from cluster.experiment.report_html import html_report
from cluster.experiment.report_json import bisection_record, experiment_record
from cluster.experiment.report_text import LiveProgress, print_bisection, print_experiment, print_matrix
from cluster.experiment.runner import ExperimentResult, run_experiment
from cluster.experiment.state_file import seed_of
from cluster.experiment.targets.url import UrlTarget
from cluster.experiment.verdict import Requirements, Status
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


async def run_command(options: ExperimentOptions) -> int:
    """The exit status. Raises WatchwordError for what the caller got wrong."""
    console = Console()
    kept = seed_of(options.state_file) if options.seed is None else options.seed
    seed = draw_seed() if kept is None else kept
    if options.url is not None:
        return await _against_url(console, options, seed)
    # Torch takes seconds to import, and nothing above needs it.
    from cluster.experiment.embedded_command import run_embedded

    return await run_embedded(console, replace(options, seed=seed))


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


async def _against_url(console: Console, options: ExperimentOptions, seed: int) -> int:
    if options.bisect or options.planted or options.fault or options.matrix or options.timing:
        raise InvalidRequestError("--matrix, --bisect, --planted, --fault and --timing need an engine in this process")
    assert options.url is not None
    target = UrlTarget(options.url, options.api_key, options.model)
    plan = plan_of(options, seed)
    try:
        await target.connect()
        with LiveProgress(console, "rounds", len(plan.rounds)) as progress:
            result = await run_experiment(target, plan, requirements=options.requirements, progress=progress)
    except ConnectionError as error:
        raise UnavailableError(str(error)) from None
    finally:
        await target.close()
    return report(console, options, [result], ())


def report(
    console: Console,
    options: ExperimentOptions,
    results: list[ExperimentResult],
    events: Sequence[BlockEvent],
    *,
    mapped: str | None = None,
    bisection: Bisection | None = None,
) -> int:
    """Prints, writes the files that were asked for, and returns the exit status. `events` are those of the condition
    `mapped`, the first one unless it is named."""
    if len(results) == 1:
        print_experiment(console, results[0])
    else:
        print_matrix(console, results)
    if bisection is not None:
        print_bisection(console, bisection)
    elif options.bisect:
        console.print("nothing to locate: no oracle found anything")
    records = [experiment_record(result) for result in results]
    record = records[0] if len(records) == 1 else {"conditions": records}
    write_json(options.json_file, record if bisection is None else {**record, "bisection": bisection_record(bisection)})
    if options.html_file is not None:
        page = html_report(results, events, mapped=mapped or results[0].condition, bisection=bisection)
        options.html_file.write_text(page, encoding="utf-8")
    if options.events_file is not None:
        write_events(options.events_file, _event_file(results[0], events))
    return int(_worst(results))


def write_json(path: Path | None, record: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _event_file(result: ExperimentResult, events: Sequence[BlockEvent]) -> EventFile:
    users = {request.name: request.owner for planned in result.plan.rounds for request in planned.requests}
    corrupted = {
        finding.request: finding.evidence["step"]
        for finding in result.findings
        if finding.request is not None and "step" in finding.evidence
    }
    return EventFile(users, corrupted, events)


def _worst(results: list[ExperimentResult]) -> Status:
    """Contaminated outweighs void, which outweighs clean."""
    found = {result.verdict.status for result in results}
    return next(status for status in (Status.CONTAMINATED, Status.VOID, Status.CLEAN) if status in found)
