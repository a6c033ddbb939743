"""A trace for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from cluster.experiment.trace import Trace


def print_trace(console: Console, trace: Trace, *, with_history: bool) -> None:
    table = Table("block", "life", "step", "came by", "written for", "scope", title=f"blocks of {trace.request}")
    for touched in trace.blocks:
        table.add_row(
            str(touched.block),
            str(touched.generation),
            str(touched.first_step),
            touched.way,
            touched.origin or "nobody",
            (touched.scope or "private").lower(),
        )
        for event in touched.history if with_history else ():
            what = f"[dim]{event.action}[/dim]"
            scope = (event.scope or "").lower()
            table.add_row("", "", str(event.step), what, event.request or "", scope, style="dim")
    console.print(table)
    if trace.foreign is None:
        console.print("no foreign state: every block was its own or shared with a scope that it may read")
        return
    foreign = trace.foreign
    where = f"step {foreign.step}" + ("" if foreign.block is None else f", block {foreign.block}")
    origin = "" if foreign.origin is None else f", from {foreign.origin}"
    console.print(f"foreign state came in at {where}{origin}: {foreign.why}", style="bold red")
