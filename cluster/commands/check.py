"""`watchword check`: the pre-launch checklist against a live deployment."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.api.terminal import width_of
from cluster.commands.options import OperatorKey


def check(
    url: Annotated[str, typer.Option(help="server")] = "http://127.0.0.1:8000",
    api_key: OperatorKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Look at a running deployment before users do: isolation, keys, books, monitoring, authentication.

    Exit status: 0 all lines are green, 1 one is red, 2 it could not be looked at.
    """
    from cluster.checks.checklist import run_checklist

    lines = asyncio.run(run_checklist(url, api_key))
    passed = all(line.passed for line in lines)
    if as_json:
        print(json.dumps({"passed": passed, "lines": [asdict(line) for line in lines]}, ensure_ascii=False, indent=1))
    else:
        table = Table("", "check", "evidence", box=None, pad_edge=False)
        for line in lines:
            table.add_row("[green]✓[/green]" if line.passed else "[red]✗[/red]", line.name, line.evidence)
        Console(width=width_of(sys.stdout)).print(table)
    raise typer.Exit(0 if passed else 1)
