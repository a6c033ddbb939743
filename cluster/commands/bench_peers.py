"""`watchword bench-peers`: our server and others, side by side, in turn, in one run."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.bench.compare import Comparison, Contestant, compare, markdown
from cluster.bench.plot import plot_comparisons
from cluster.bench.workload import WorkloadName
from cluster.commands.bench import measure
from cluster.commands.options import API_KEY_ENV

console = Console(stderr=True)


def bench_peers(
    url: Annotated[str, typer.Option(help="our server")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="operator or delegate key of our server", envvar=API_KEY_ENV)
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="NAME=URL of another running server, repeatable")] = None,
    workloads: Annotated[str, typer.Option(help="any of A, B, C")] = "ABC",
    rounds: Annotated[int, typer.Option(min=1, help="runs of each workload on each server")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="all figures")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="tables, for the docs")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="bar chart (PNG)")] = None,
) -> None:
    """Compare with other servers that run already, on the same machine and model. Nothing else should be running."""
    rivals = [_parse_peer(item) for item in peer or []]
    comparisons = asyncio.run(_run(url, api_key, rivals, workloads.upper(), rounds))
    if json_file is not None:
        data = {item.workload: item.rounds for item in comparisons}
        json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    ours = sorted({name for item in comparisons for name in item.rounds if name.startswith("watchword")})
    text = markdown(comparisons, ours, [rival.name for rival in rivals])
    typer.echo(text)
    if markdown_file is not None:
        markdown_file.write_text(text, encoding="utf-8")
    if plot_file is not None:
        plot_comparisons(comparisons, plot_file)


async def _run(
    url: str, api_key: str | None, rivals: list[Contestant], workloads: str, num_rounds: int
) -> list[Comparison]:
    seed = secrets.token_hex(4)
    base_url = _base(url)
    for contestant in [Contestant("watchword", base_url, api_key), *rivals]:
        await _run_once(contestant, "W", seed)
    comparisons = []
    for name in workloads:
        workload: WorkloadName = name  # type: ignore[assignment]  # checked by build_workload
        contestants = [*_our_ways(workload, base_url, api_key), *rivals]
        comparisons.append(await compare(workload, contestants, num_rounds, seed, _run_once))
    return comparisons


def _our_ways(workload: WorkloadName, base_url: str, api_key: str | None) -> list[Contestant]:
    """A is told three ways: what may be shared differs, and so must the figures."""
    if workload != "A":
        return [Contestant("watchword", base_url, api_key)]
    return [
        Contestant("watchword, templates, 12 users", base_url, api_key, uses_templates=True),
        Contestant("watchword, one user", base_url, api_key, users=1),
        Contestant("watchword, raw, 12 users", base_url, api_key),
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
        raise typer.BadParameter(f"{item!r} is not NAME=URL", param_hint="--peer")
    return Contestant(name, _base(url))


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1") + "/v1"
