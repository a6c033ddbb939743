"""What a person sees in the terminal: progress while it runs, and the verdict as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from cluster.experiment.bisect import Bisection
from cluster.experiment.runner import ExperimentResult
from cluster.experiment.statistics import rule_of_three
from cluster.experiment.verdict import RoundResult, Status

STATUS_STYLE = {Status.CLEAN: "bold green", Status.CONTAMINATED: "bold red", Status.VOID: "bold yellow"}
_MAX_REASONS = 12
_ROUNDS_PER_LINE = 10


class LiveProgress:
    """A progress bar whose text counts contaminated rounds; use as a context manager."""

    def __init__(self, console: Console, description: str, num_rounds: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._console = console
        self._description = description
        self._num_rounds = num_rounds
        self._num_done = 0
        self._num_contaminated = 0
        self._task: TaskID = self._progress.add_task(description, total=num_rounds)

    def __enter__(self) -> LiveProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, result: RoundResult) -> None:
        self._num_done += 1
        self._num_contaminated += result.is_contaminated
        text = f"{self._description}: {self._num_contaminated} contaminated"
        self._progress.update(self._task, advance=1, description=text)
        # A log file gets a line now and then instead of a bar.
        if not self._console.is_terminal and self._num_done % _ROUNDS_PER_LINE == 0:
            self._console.print(f"{text} of {self._num_done} rounds ({self._num_rounds} in all)")


def print_experiment(console: Console, result: ExperimentResult) -> None:
    verdict = result.verdict
    console.print(_observations(result))
    if result.info.settings:
        console.print("settings: " + ", ".join(f"{name} {value}" for name, value in result.info.settings.items()))
    for control, outcome in result.controls.items():
        console.print(f"control: {control}: {outcome}")
    console.print(f"rounds with a foreign marker: {verdict.marker_rate}")
    console.print(f"rounds with any finding:      {verdict.any_rate}")
    if verdict.any_rate.trials and not verdict.any_rate.hits:
        bound = rule_of_three(verdict.any_rate.trials)
        console.print(f"none of {verdict.any_rate.trials} supports only: rate < {bound:.2%} at 95 %")
    console.print(f"verdict: {verdict.status.name.lower()}", style=STATUS_STYLE[verdict.status])
    for reason in verdict.reasons[:_MAX_REASONS]:
        console.print(f"  {reason}", markup=False)
    if len(verdict.reasons) > _MAX_REASONS:
        console.print(f"  … and {len(verdict.reasons) - _MAX_REASONS} more in the JSON report")


def print_matrix(console: Console, results: Sequence[ExperimentResult]) -> None:
    table = Table("condition", "rounds", "requests", "foreign marker", "any finding", "95 %", "shared step", "verdict")
    for result in results:
        verdict = result.verdict
        found = verdict.any_rate
        style = STATUS_STYLE[verdict.status]
        table.add_row(
            result.condition,
            str(found.trials),
            str(sum(item.num_requests for item in result.rounds)),
            str(verdict.marker_rate.hits),
            str(found.hits),
            f"{found.low:.1%} – {found.high:.1%}",
            "–" if verdict.shared_rate is None else f"{verdict.shared_rate.value:.0%}",
            f"[{style}]{verdict.status.name.lower()}[/]",
        )
    console.print(table)


def _observations(result: ExperimentResult) -> Table:
    table = Table("observation", "rounds", title=f"{result.condition} · {result.info.model} · {result.info.name}")
    rounds = result.rounds
    table.add_row("A's marker in B's answer", f"{sum(item.a_in_b for item in rounds)} of {len(rounds)}")
    table.add_row("B's marker in A's answer", f"{sum(item.b_in_a for item in rounds)} of {len(rounds)}")
    for language, found in result.verdict.own_rate.items():
        table.add_row(f"own marker in own answer ({language})", f"{found.hits} of {found.trials} answers")
    for wording, found in result.own_by_wording.items():
        table.add_row(f"  asked for as {wording}", f"{found.hits} of {found.trials} answers")
    shared = result.verdict.shared_rate
    how = "shared an engine step" if result.info.sees_steps else "overlapped in time (seen from outside)"
    table.add_row(f"A and B {how}", "not seen" if shared is None else f"{shared.hits} of {shared.trials}")
    for (oracle, kind), count in Counter((item.oracle.value, item.kind) for item in result.findings).items():
        table.add_row(f"finding: {oracle}, {kind}", str(count))
    return table


def print_bisection(console: Console, bisection: Bisection) -> None:
    table = Table("switched", "rounds", "contaminated", "outcome", title="bisection of the recorded arrivals")
    for trial in bisection.trials:
        table.add_row(
            " + ".join(trial.switches), str(trial.num_rounds), str(trial.num_contaminated), trial.outcome.value
        )
    console.print(table)
    named = "undecided" if bisection.named is None else bisection.named.value
    console.print(f"component: {named}", style="bold")
