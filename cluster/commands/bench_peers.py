"""`watchword bench-peers`: our server and others, side by side, in turn, in one run."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.api.terminal import width_of
from cluster.bench.compare import Comparison, Contestant, compare, markdown
from cluster.bench.plot import plot_comparisons
from cluster.bench.turns import stopped
from cluster.bench.workload import WorkloadName
from cluster.commands.bench import measure
from cluster.commands.options import API_KEY_ENV

console = Console(stderr=True, width=width_of(sys.stderr))


def bench_peers(
    url: Annotated[str, typer.Option(help="our server")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="operator or delegate key of our server", envvar=API_KEY_ENV)
    ] = None,
    pid: Annotated[int | None, typer.Option(help="our server's process: stopped while others are measured")] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="NAME=URL of another running server, or NAME=URL,PID; repeatable")
    ] = None,
    workloads: Annotated[str, typer.Option(help="any of A, B, C")] = "ABC",
    rounds: Annotated[int, typer.Option(min=1, help="runs of each workload on each server")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="all figures")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="tables, for the docs")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="bar chart (PNG)")] = None,
) -> None:
    """Compare with other servers that run already, on the same machine and model. Nothing else should be running.

    Servers whose process is told are stopped (SIGSTOP) while another one is measured: on a small machine an idle
    neighbour changes the figures.
    """
    rivals = [_parse_peer(item) for item in peer or []]
    ours = Contestant("watchword", _base(url), api_key, pid=pid)
    try:
        comparisons = asyncio.run(_run(ours, rivals, workloads, rounds))
    except ProcessLookupError as error:
        raise typer.BadParameter(str(error), param_hint="--pid, --peer") from None
    if json_file is not None:
        data = {item.workload: item.rounds for item in comparisons}
        json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    our_ways = sorted({name for item in comparisons for name in item.rounds if name.startswith("watchword")})
    text = markdown(comparisons, our_ways, [rival.name for rival in rivals])
    typer.echo(text)
    if markdown_file is not None:
        markdown_file.write_text(text, encoding="utf-8")
    if plot_file is not None:
        plot_comparisons(comparisons, plot_file)


async def _run(ours: Contestant, rivals: list[Contestant], workloads: str, num_rounds: int) -> list[Comparison]:
    seed = secrets.token_hex(4)
    pids = {contestant.pid for contestant in (ours, *rivals) if contestant.pid is not None}
    numbers = itertools.count()

    async def run_alone(contestant: Contestant, workload: WorkloadName, seed: str) -> dict[str, Any]:
        with stopped(pids - {contestant.pid}):
            # What has stood still catches up with its timers before it is measured.
            await _run_once(contestant, "W", f"{seed}-{next(numbers)}")
            return await _run_once(contestant, workload, seed)

    comparisons = []
    for name in workloads.upper():
        workload: WorkloadName = name  # type: ignore[assignment]  # checked by build_workload
        comparisons.append(await compare(workload, [*_our_ways(workload, ours), *rivals], num_rounds, seed, run_alone))
    return comparisons


def _our_ways(workload: WorkloadName, ours: Contestant) -> list[Contestant]:
    """A is told three ways: what may be shared differs, and so must the figures."""
    if workload != "A":
        return [ours]
    return [
        replace(ours, name="watchword, templates, 12 users", uses_templates=True),
        replace(ours, name="watchword, one user", users=1),
        replace(ours, name="watchword, raw, 12 users"),
    ]


async def _run_once(contestant: Contestant, workload: WorkloadName, seed: str) -> dict[str, Any]:
    console.print(f"[dim]workload {workload} on {contestant.name}[/dim]")
    summary = await measure(
        workload,
        contestant.base_url,
        contestant.api_key,
        users=contestant.users,
        seed=seed,
        templates=contestant.uses_templates,
    )
    console.print(
        f"{workload}  {contestant.name}: {summary['output_tokens_per_s']:g} output tok/s, "
        f"TTFT p50 {summary['ttft_p50_ms']:g} ms, ITL p50 {summary['itl_p50_ms']:g} ms"
    )
    return summary


def _parse_peer(item: str) -> Contestant:
    name, equals, url = item.partition("=")
    if not equals:
        raise typer.BadParameter(f"{item!r} is not NAME=URL or NAME=URL,PID", param_hint="--peer")
    url, comma, pid = url.partition(",")
    if comma and not pid.isdecimal():
        raise typer.BadParameter(f"{pid!r} in {item!r} is not the number of a process", param_hint="--peer")
    return Contestant(name, _base(url), pid=int(pid) if comma else None)


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1") + "/v1"
