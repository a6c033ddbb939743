"""Side by side: the same workloads on several servers, in turn (A B A B), a new seed for each round.

Absolute figures depend on the machine and its mood; ratios within one run are what counts. A seed is shared by all
servers of a round, so that each gets the same bytes, and no server ever sees a seed twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from cluster.bench.workload import WorkloadName


@dataclass(frozen=True, slots=True)
class Contestant:
    """One server under one way of using it. `pid`: its first process, when it is to be stopped while others run."""

    name: str
    base_url: str
    api_key: str | None = None
    users: int = 12
    uses_templates: bool = False
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rounds of one workload: contestant -> one summary a round."""

    workload: WorkloadName
    rounds: dict[str, list[dict[str, Any]]]

    def median(self, name: str, figure: str) -> float:
        return statistics.median(summary[figure] for summary in self.rounds[name])

    def ratio(self, ours: str, figure: str, rivals: list[str]) -> float:
        """Ours over the best rival's, each the median over the rounds. `figure` in ms: the best is the smallest."""
        pick = min if figure.endswith("_ms") else max
        return self.median(ours, figure) / pick(self.median(rival, figure) for rival in rivals)


RunOnce = Callable[[Contestant, WorkloadName, str], Awaitable[dict[str, Any]]]


async def compare(
    workload: WorkloadName, contestants: list[Contestant], num_rounds: int, seed: str, run_once: RunOnce
) -> Comparison:
    """Every contestant once a round, in turn. The order rotates, so that none always runs after the same one."""
    rounds: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in contestants}
    for number in range(num_rounds):
        shift = number % len(contestants)
        for contestant in contestants[shift:] + contestants[:shift]:
            summary = await run_once(contestant, workload, f"{seed}-{workload}-{number}-{_way(contestant)}")
            rounds[contestant.name].append(summary)
    return Comparison(workload, rounds)


def _way(contestant: Contestant) -> str:
    """Different ways of using one server must not find each other's prefixes."""
    return f"{contestant.users}{'t' if contestant.uses_templates else ''}"


def markdown(comparisons: list[Comparison], ours: list[str], rivals: list[str]) -> str:
    """One table a workload: medians of each contestant, and ours against the best rival."""
    lines = []
    for comparison in comparisons:
        lines += [
            f"### Workload {comparison.workload}",
            "",
            "| server | output tok/s | TTFT p50 ms | TTFT p95 ms | ITL p50 ms | cached tokens | errors |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name in comparison.rounds:
            figures = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "cached_tokens", "errors")
            values = " | ".join(f"{comparison.median(name, figure):g}" for figure in figures)
            lines.append(f"| {name} | {values} |")
        if rivals:
            lines += ["", *_ratio_lines(comparison, ours, rivals)]
        lines.append("")
    return "\n".join(lines)


def _ratio_lines(comparison: Comparison, ours: list[str], rivals: list[str]) -> list[str]:
    return [
        f"{name} against the best of the others: output tokens/s × "
        f"{comparison.ratio(name, 'output_tokens_per_s', rivals):.2f}, "
        f"TTFT p50 × {comparison.ratio(name, 'ttft_p50_ms', rivals):.2f}."
        for name in ours
        if name in comparison.rounds
    ]
