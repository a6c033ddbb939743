"""A timing run for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from cluster.experiment.report_text import STATUS_STYLE
from cluster.experiment.timing import TimingResult


def print_timing(console: Console, result: TimingResult) -> None:
    table = Table("warmed by", "KS statistic", "p", "rejects", title=f"time to first token, {result.num_pairs} pairs")
    for name, found in (("another user", result.foreign), ("the same user (control)", result.own)):
        table.add_row(name, f"{found.statistic:.3f}", f"{found.p_value:.2g}", "yes" if found.rejects else "no")
    console.print(table)
    console.print(
        f"median {result.median_cold_s * 1000:.1f} ms cold, {result.median_own_warm_s * 1000:.1f} ms after one's own "
        f"warm-up; at α = {result.foreign.alpha:g} a shift of {result.shift_s * 1000:.2f} ms would show"
    )
    console.print(f"verdict: {result.status.name.lower()}", style=STATUS_STYLE[result.status])
