"""What a run prints and the files that it writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.experiment.bisect import Bisection
from cluster.experiment.event_file import BlockEvent, EventFile, write_events
from cluster.experiment.options import ExperimentOptions
from cluster.experiment.report_html import html_report
from cluster.experiment.report_json import bisection_record, experiment_record
from cluster.experiment.report_text import print_bisection, print_experiment, print_matrix
from cluster.experiment.runner import ExperimentResult
from cluster.experiment.verdict import Status


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
