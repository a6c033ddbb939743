"""The command `simulate`. `app` runs alone (`python -m router.simulate`) or mounted in another command line."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cluster.api.terminal import width_of
from router.policies.catalog import POLICIES
from router.simulate.config import EngineKind, SimulationConfig
from router.simulate.fairness import TenantComparison, compare_tenants, num_simulated, num_tenants
from router.simulate.generators import GENERATORS, GeneratorConfig
from router.simulate.loaders import load_trace
from router.simulate.plot import plot_results, plot_tenants
from router.simulate.result import PolicyResult
from router.simulate.run import policy_names, run_simulation, write_json
from router.simulate.step_cost import fit_step_cost, load_step_samples
from router.simulate.trace import TraceRequest, scale_load

app = typer.Typer(add_completion=False)

EXAMPLES = """
Replays traffic against a simulated cluster, with the very policy code that the router runs.

Examples:

  watchword simulate --trace conversation.jsonl --policy all

  watchword simulate --trace conversation.jsonl --policy watchword,lmetric,oracle --load 1.25 --plot out.png

  watchword simulate --generate zipf-1.6 --cache-blocks 400 --policy all

  watchword simulate --generate multi-turn --rate 2500 --requests 200000 --workers 1000 --policy watchword,sglang

  watchword simulate --generate tenants --rate 8 --engine shared --max-num-seqs 8 --newcomers-first --policy watchword

Traffic of several tenants is run twice more, each tenant alone and all of them behind the router's admission.
"""


@app.command(help=EXAMPLES)
def simulate(
    trace: Annotated[Path | None, typer.Option(help="Mooncake JSON Lines or Azure CSV, told apart by content.")] = None,
    generate: Annotated[str | None, typer.Option(help=f"Made-up traffic: {', '.join(GENERATORS)}.")] = None,
    requests: Annotated[int, typer.Option(help="Generated requests.")] = 10_000,
    rate: Annotated[float, typer.Option(help="Generated requests per second, all workers together.")] = 12.0,
    policy: Annotated[str, typer.Option(help=f"all, or some of: {', '.join(POLICIES)}.")] = "all",
    workers: Annotated[int, typer.Option(help="Number of workers.")] = 8,
    load: Annotated[float, typer.Option(help="Arrivals this many times as fast.")] = 1.0,
    cache_blocks: Annotated[int, typer.Option(help="Prefix cache of a worker, in blocks of the trace.")] = 4000,
    routers: Annotated[int, typer.Option(help="Router replicas.")] = 1,
    lag: Annotated[str, typer.Option(help="Seconds until replicas learn of one another; never.")] = "0",
    engine: Annotated[EngineKind, typer.Option(help="serial: prefill alone; shared: with decode.")] = EngineKind.SERIAL,
    prefill_rate: Annotated[float, typer.Option(help="Prompt tokens per second of one worker.")] = 6000.0,
    max_num_seqs: Annotated[int, typer.Option(help="Shared engine and admission: sequences at once.")] = 64,
    token_budget: Annotated[int, typer.Option(help="Shared engine: tokens in a step.")] = 2048,
    newcomers_first: Annotated[
        bool, typer.Option("--newcomers-first", help="Shared engine: a prompt's first chunk goes before older ones.")
    ] = False,
    step_times: Annotated[
        Path | None,
        typer.Option(help="Shared engine: measured steps, a JSON list a line: prefill tokens, decoding, seconds."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the policies' ties and of generated traffic.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results here (.png, .svg, .pdf).")] = None,
    quiet: Annotated[bool, typer.Option(help="No progress, no table.")] = False,
) -> None:
    try:
        config = SimulationConfig(
            num_workers=workers,
            cache_blocks=cache_blocks,
            num_routers=routers,
            lag_s=math.inf if lag == "never" else float(lag),
            engine=engine,
            prefill_tokens_per_s=prefill_rate,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            newcomers_first=newcomers_first,
            seed=seed,
        )
        if step_times is not None:
            config = config.with_step_cost(fit_step_cost(load_step_samples(step_times)))
        names = policy_names(policy)
        traffic = _traffic(trace, generate, GeneratorConfig(requests, rate, seed))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    results, fairness = _run(traffic, config, names, load, quiet=quiet)
    if json is not None:
        write_json(results, json, fairness)
    if plot is not None:
        name = trace.stem if trace is not None else str(generate)
        title = f"{name} at {load:g}x, {workers} workers, {cache_blocks} blocks, {engine.value}"
        plot_results(results, plot, title)
        for policy_name, comparisons in fairness.items():
            plot_tenants(comparisons, plot.with_stem(f"{plot.stem}-{policy_name}-tenants"), f"{policy_name}: {title}")
    if not quiet:
        Console(width=width_of(sys.stdout)).print(results_table(results))
        for policy_name, comparisons in fairness.items():
            Console(width=width_of(sys.stdout)).print(tenants_table(policy_name, comparisons))


def _traffic(trace: Path | None, generate: str | None, generator: GeneratorConfig) -> list[TraceRequest]:
    if (trace is None) == (generate is None):
        raise ValueError("give either --trace FILE or --generate KIND")
    if trace is not None:
        return load_trace(trace)
    if generate not in GENERATORS:
        raise ValueError(f"unknown traffic {generate!r}, known are {', '.join(GENERATORS)}")
    return GENERATORS[generate](generator)


def _run(
    traffic: list[TraceRequest], config: SimulationConfig, names: list[str], load: float, *, quiet: bool
) -> tuple[dict[str, PolicyResult], dict[str, list[TenantComparison]]]:
    """Of traffic with several tenants also what each policy makes of them."""
    bar = Progress(
        TextColumn("{task.description:>15}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), transient=True
    )
    has_tenants = num_tenants(traffic) > 1 and config.num_routers == 1
    each = len(traffic) + (num_simulated(traffic) if has_tenants else 0)
    with nullcontext() if quiet else bar:
        task = bar.add_task("requests", total=each * len(names))

        def progress(name: str, count: int) -> None:
            bar.update(task, advance=count, description=name)

        results = run_simulation(traffic, config, policies=names, load=load, progress=progress)
        if not has_tenants:
            return results, {}
        scaled = scale_load(traffic, load)
        return results, {
            name: compare_tenants(scaled, config, name, results[name].tenants, partial(progress, name))
            for name in names
        }


def results_table(results: dict[str, PolicyResult]) -> Table:
    """Best mean first."""
    table = Table("policy", "mean", "p90", "p99", "hit rate", "imbalance", title="time to first token, s")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, result in sorted(results.items(), key=lambda item: item[1].ttft_mean_s):
        times = (f"{value:.2f}" for value in (result.ttft_mean_s, result.ttft_p90_s, result.ttft_p99_s))
        table.add_row(name, *times, f"{result.hit_rate:.3f}", f"{result.imbalance:.2f}")
    return table


def tenants_table(policy: str, comparisons: list[TenantComparison]) -> Table:
    """Times as mean / p95."""
    title = f"{policy}: time to first token of each tenant, s (mean / p95)"
    table = Table("tenant", "alone", "no admission", "admission", "p95 to alone", "refused", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for each in comparisons:
        runs = (each.alone, each.unguarded, each.admitted)
        times = (f"{run.ttft_mean_s:.2f} / {run.ttft_p95_s:.2f}" for run in runs)
        ratio = each.admitted.ttft_p95_s / each.alone.ttft_p95_s if each.alone.ttft_p95_s else math.nan
        refused = f"{each.admitted.num_refused} of {each.admitted.num_requests}"
        table.add_row(str(each.alone.tenant), *times, f"{ratio:.1f}", refused)
    return table
