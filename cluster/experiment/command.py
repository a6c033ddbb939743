"""What `watchword experiment` does with its options: picks the kind of run, and writes the reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.api.errors import InvalidRequestError, UnavailableError
from cluster.experiment.condition import baseline
from cluster.experiment.matrix import matrix
from cluster.experiment.plan import Plan, make_plan
from cluster.experiment.replay import draw_seed, read_plan, write_plan
from cluster.experiment.report_json import experiment_record
from cluster.experiment.report_text import LiveProgress, print_experiment, print_matrix
from cluster.experiment.runner import ExperimentResult, run_experiment
from cluster.experiment.targets.url import UrlTarget
from cluster.experiment.verdict import Requirements, Status
from cluster.experiment.wordings import wordings_named
from cluster.experiment.workload import Workload


@dataclass(frozen=True, slots=True)
class ExperimentOptions:
    """As given on the command line; see cluster/experiment/cli.py."""

    url: str | None
    api_key: str | None
    rounds: int
    model: str | None
    wording: str
    seed: int | None
    replay: Path | None
    record: Path | None
    exact: bool
    matrix: bool
    bisect: bool
    planted: str | None
    timing: bool
    chinese_must_obey: bool
    json_file: Path | None
    html_file: Path | None


async def run_command(options: ExperimentOptions) -> int:
    """The exit status. Raises WatchwordError for what the caller got wrong."""
    console = Console()
    try:
        wordings = tuple(wording.name for wording in wordings_named(options.wording))
    except ValueError as error:
        raise InvalidRequestError(str(error), param="wording") from None
    workload = Workload(wordings=wordings)
    seed = options.seed if options.seed is not None else draw_seed()
    if options.url is not None:
        return await _against_url(console, options, workload, seed)
    return await _embedded(console, options, workload, seed)


async def _against_url(console: Console, options: ExperimentOptions, workload: Workload, seed: int) -> int:
    if options.bisect or options.planted or options.matrix:
        raise InvalidRequestError("--bisect, --planted and --matrix change engine settings: they need --embedded")
    assert options.url is not None
    target = UrlTarget(options.url, options.api_key, options.model)
    plan = _plan(options, workload, seed)
    try:
        await target.connect()
        with LiveProgress(console, "rounds", len(plan.rounds)) as progress:
            result = await run_experiment(target, plan, requirements=_requirements(options), progress=progress)
    except ConnectionError as error:
        raise UnavailableError(str(error)) from None
    finally:
        await target.close()
    return _report(console, options, [result])


async def _embedded(console: Console, options: ExperimentOptions, workload: Workload, seed: int) -> int:
    from cluster.experiment.targets.weights import load_model  # torch takes seconds to import: not for --url

    console.print(f"seed {seed}; loading the model …")
    loaded = load_model(options.model)
    from cluster.experiment.trial import make_oracles, make_target

    condition = baseline(options.rounds, workload, _requirements(options))
    conditions = matrix(options.rounds, workload) if options.matrix else [condition]
    results = []
    targets = []
    for one in conditions:
        plan = _plan(options, one.workload, seed) if not options.matrix else one.plan(seed, options.rounds)
        target = make_target(loaded, one)
        with LiveProgress(console, one.name, len(plan.rounds)) as progress:
            result = await run_experiment(
                target,
                plan,
                oracles=make_oracles(loaded, one, is_exact=options.exact),
                requirements=one.requirements,
                condition=one.name,
                progress=progress,
            )
        results.append(result)
        targets.append(target)
        if options.matrix:
            console.print(f"{one.name}: {result.verdict.status.name.lower()}")
    return _report(console, options, results)


def _plan(options: ExperimentOptions, workload: Workload, seed: int) -> Plan:
    plan = read_plan(options.replay) if options.replay else make_plan(seed, options.rounds, workload)
    if options.record is not None:
        write_plan(options.record, plan)
    return plan


def _requirements(options: ExperimentOptions) -> Requirements:
    return Requirements(chinese_must_obey=options.chinese_must_obey)


def _report(console: Console, options: ExperimentOptions, results: list[ExperimentResult]) -> int:
    if len(results) == 1:
        print_experiment(console, results[0])
    else:
        print_matrix(console, results)
    if options.json_file is not None:
        records: Any = [experiment_record(result) for result in results]
        text = json.dumps(records[0] if len(records) == 1 else {"conditions": records}, ensure_ascii=False, indent=1)
        options.json_file.write_text(text, encoding="utf-8")
    return int(_worst(results))


def _worst(results: list[ExperimentResult]) -> Status:
    """Contaminated outweighs void, which outweighs clean."""
    found = {result.verdict.status for result in results}
    return next(status for status in (Status.CONTAMINATED, Status.VOID, Status.CLEAN) if status in found)
