"""The runs that need an engine in this process: the experiment itself, the matrix, bisection and planted faults."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from cluster.experiment.bisect_run import bisect_run
from cluster.experiment.condition import MAX_BLOCKS, Condition, baseline, default_engine
from cluster.experiment.event_file import BlockEvent
from cluster.experiment.faults.catalog import planted_faults
from cluster.experiment.faults.fault import Fault
from cluster.experiment.faults.stages import make_stages
from cluster.experiment.long_run import LongRun, continue_run
from cluster.experiment.matrix import matrix
from cluster.experiment.matrix_state import MatrixState
from cluster.experiment.options import ExperimentOptions, plan_of, workload_of
from cluster.experiment.plan import Plan
from cluster.experiment.planted import Case, Investigator, investigate_blind
from cluster.experiment.planted_state import PlantedState
from cluster.experiment.report_planted import planted_record, print_planted
from cluster.experiment.report_text import LiveProgress
from cluster.experiment.report_timing import print_timing
from cluster.experiment.reports import report, write_json
from cluster.experiment.runner import ExperimentResult, run_experiment
from cluster.experiment.statistics import rule_of_three
from cluster.experiment.targets.embedded import EmbeddedTarget
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.targets.target import Target
from cluster.experiment.targets.weights import LoadedModel, load_model
from cluster.experiment.targets.worker_group import WorkerGroup
from cluster.experiment.timing import MIN_PAIRS, Samples, measure
from cluster.experiment.trial import fitted, make_oracles, make_target
from cluster.experiment.verdict import MIN_SHARED_ROUNDS, Status

_PLANTED_ROUNDS = 4
_LONG_RUN_STATE = Path("isolation.json")


async def run_embedded(console: Console, options: ExperimentOptions) -> int:
    assert options.seed is not None
    faults = planted_faults(options.planted or options.fault or "") if options.planted or options.fault else ()
    console.print(f"seed {options.seed}; loading the model …")
    loaded = load_model(options.model)
    if options.planted:
        return await _planted(console, options, loaded, faults)
    if options.requests is not None:
        return await _long_run(console, options, loaded)
    if options.timing:
        return await _timing(console, options, loaded)
    parts = faults[0].make_parts() if faults else None
    if options.matrix:
        return await _matrix(console, options, loaded, parts)
    return await _one_condition(console, options, loaded, parts)


async def _planted(console: Console, options: ExperimentOptions, loaded: LoadedModel, faults: Sequence[Fault]) -> int:
    """Those that the state file does not know yet; the report is on all of them."""
    logging.getLogger("workers").setLevel(logging.CRITICAL)  # the alarms are what is wanted here, by the hundred
    num_rounds = min(options.rounds, _PLANTED_ROUNDS)
    state = PlantedState.load(options.state_file, loaded.name, options.seed or 0, num_rounds)
    left = [fault for fault in faults if fault.name not in state.cases]
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("planted faults", total=len(faults), completed=len(faults) - len(left))

        def keep(name: str, case: Case) -> None:
            state.add(name, case)
            bar.update(task, advance=1)
            if not console.is_terminal:  # a log file gets a line instead of a bar
                console.print(f"{len(state.cases)} done: {name}", markup=False)

        investigator = Investigator(loaded, make_stages(loaded, state.seed, num_rounds))
        await investigate_blind(investigator, left, random.Random(state.seed), keep)
    cases = {fault.name: state.cases[fault.name] for fault in faults}
    print_planted(console, faults, cases)
    write_json(options.json_file, planted_record(faults, cases))
    return int(Status.CLEAN if all(case.found_by for case in cases.values()) else Status.VOID)


async def _long_run(console: Console, options: ExperimentOptions, loaded: LoadedModel) -> int:
    """Zero false alarms on the clean engine; goes on where the state file says an earlier run stopped."""
    assert options.requests is not None
    path = options.state_file or _LONG_RUN_STATE
    state = LongRun.load(path, options.seed or 0)
    load = workload_of(options)
    conditions = [
        baseline(load),
        baseline(replace(load, mixed_sampling=True, abort_fraction=0.3, concurrency=4)),
        baseline(replace(load, context_words=(60, 60), prefix_similarity=0.5)),
    ]
    with Progress(console=console) as bar:
        task = bar.add_task("requests", total=options.requests, completed=state.num_requests)
        await continue_run(
            state,
            path,
            loaded,
            conditions,
            num_requests=options.requests,
            rounds_per_chunk=options.rounds,
            make_oracles=lambda loaded, condition: make_oracles(loaded, condition, is_exact=options.exact),
            progress=lambda state: bar.update(task, completed=state.num_requests),
        )
    console.print(
        f"{state.num_requests} requests in {state.num_rounds} rounds, {state.num_shared} of them shared a step: "
        f"{len(state.findings)} findings; rate < {rule_of_three(state.num_rounds):.2%} of rounds at 95 %"
    )
    for finding in state.findings:
        console.print(f"  {finding}", markup=False)
    if state.findings:
        return int(Status.CONTAMINATED)
    return int(Status.CLEAN if state.num_shared >= MIN_SHARED_ROUNDS * state.num_rounds else Status.VOID)


async def _timing(console: Console, options: ExperimentOptions, loaded: LoadedModel) -> int:
    target = EmbeddedTarget(loaded, replace(default_engine(), num_blocks=MAX_BLOCKS))
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("timed pairs", total=MIN_PAIRS)
        samples = Samples.load(options.state_file, loaded.name, options.seed or 0)
        result = await measure(target, samples, progress=lambda done: bar.update(task, completed=done))
    print_timing(console, result)
    write_json(options.json_file, result.record())
    return int(result.status)


async def _matrix(console: Console, options: ExperimentOptions, loaded: LoadedModel, parts: StackParts | None) -> int:
    results: list[ExperimentResult] = []
    events: Sequence[BlockEvent] = ()
    mapped = ""  # the condition that `events` are of: the first that ran in this process
    state = MatrixState.load(options.state_file, loaded.name, options.seed or 0, options.rounds)
    for given in matrix(workload_of(options)):
        plan = given.plan(options.seed or 0, options.rounds)
        known = state.result(given.name, plan)
        if known is not None:
            results.append(known)
            continue
        condition = fitted(loaded, given, plan)
        target = make_target(loaded, condition, parts)
        results.append(await _run(console, options, loaded, condition, plan, target))
        state.add(results[-1])
        console.print(f"{condition.name}: {results[-1].verdict.status.name.lower()}")
        if not events:
            events, mapped = _events_of(target), condition.name
    return report(console, options, results, events, mapped=mapped)


async def _one_condition(
    console: Console, options: ExperimentOptions, loaded: LoadedModel, parts: StackParts | None
) -> int:
    plan = plan_of(options, options.seed or 0)
    condition = fitted(loaded, baseline(plan.workload, options.requirements), plan)
    target = make_target(loaded, condition, parts)
    result = await _run(console, options, loaded, condition, plan, target)
    found = None
    if options.bisect and result.findings:
        found = await bisect_run(loaded, condition, result, parts, is_exact=options.exact)
    return report(console, options, [result], _events_of(target), bisection=found)


async def _run(
    console: Console,
    options: ExperimentOptions,
    loaded: LoadedModel,
    condition: Condition,
    plan: Plan,
    target: Target,
) -> ExperimentResult:
    with LiveProgress(console, condition.name, len(plan.rounds)) as progress:
        return await run_experiment(
            target,
            plan,
            oracles=make_oracles(loaded, condition, is_exact=options.exact),
            requirements=condition.requirements,
            condition=condition.name,
            progress=progress,
        )


def _events_of(target: Target) -> Sequence[BlockEvent]:
    return list(target.events) if isinstance(target, EmbeddedTarget | WorkerGroup) else []
