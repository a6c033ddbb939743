"""What became of the planted faults: who found each, and which component was named, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.finding import OracleName
from cluster.experiment.planted import Case

UNDECIDED = "undecided"


def planted_record(faults: Sequence[Fault], cases: Mapping[str, Case]) -> dict[str, Any]:
    return {
        "faults": [
            {
                "name": fault.name,
                "found_by": _found_by(cases[fault.name]),
                "requests": cases[fault.name].requests,
                "component": fault.component.value,
                "component_named": _named(cases[fault.name]),
            }
            for fault in faults
        ],
        "invisible_to_marker": invisible_to_marker(cases),
    }


def invisible_to_marker(cases: Mapping[str, Case]) -> list[str]:
    """Found by another oracle, in traffic in which no marker ever turned up elsewhere."""
    return [name for name, case in cases.items() if case.found_by and OracleName.MARKER not in case.oracles]


def confusion(faults: Sequence[Fault], cases: Mapping[str, Case]) -> dict[tuple[str, str], int]:
    """(component, component named) -> number of faults."""
    return dict(Counter((fault.component.value, _named(cases[fault.name]) or UNDECIDED) for fault in faults))


def print_planted(console: Console, faults: Sequence[Fault], cases: Mapping[str, Case]) -> None:
    table = Table("fault", "found by", "requests", "in", "component", "named", title="planted faults")
    for fault in faults:
        case = cases[fault.name]
        named = _named(case) or UNDECIDED
        style = "green" if named == fault.component.value else "red"
        oracles = ", ".join(oracle.value for oracle in OracleName if oracle in case.oracles) or "nobody"
        table.add_row(
            fault.name, oracles, str(case.requests), case.stage or "", fault.component.value, f"[{style}]{named}[/]"
        )
    console.print(table)
    _print_confusion(console, faults, cases)
    num_found = sum(case.found_by is not None for case in cases.values())
    num_named = sum(_named(cases[fault.name]) == fault.component.value for fault in faults)
    unseen = invisible_to_marker(cases)
    console.print(f"found {num_found} of {len(faults)}, component named rightly for {num_named}")
    console.print(f"invisible to the marker ({len(unseen)}): {', '.join(unseen)}")


def _print_confusion(console: Console, faults: Sequence[Fault], cases: Mapping[str, Case]) -> None:
    counts = confusion(faults, cases)
    rows = [component.value for component in Component if any(true == component.value for true, _ in counts)]
    columns = [*(one.value for one in Component if any(named == one.value for _, named in counts))]
    if any(named == UNDECIDED for _, named in counts):
        columns.append(UNDECIDED)
    table = Table("planted in \\ named", *columns, title="confusion matrix")
    for row in rows:
        table.add_row(row, *(str(counts.get((row, column), "")) for column in columns))
    console.print(table)


def _found_by(case: Case) -> str | None:
    return case.found_by.value if case.found_by else None


def _named(case: Case) -> str | None:
    return case.named.value if case.named else None
