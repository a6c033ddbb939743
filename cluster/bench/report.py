"""Figures of one run: throughput, time to first token (TTFT), inter-token latency (ITL), cached tokens."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.bench.driver import BenchResult, RequestRecord


def percentile(values: list[float], percent: float) -> float | None:
    """Nearest rank; None of an empty list."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


def summarise(workload: str, seed: str, concurrency: int, num_users: int, result: BenchResult) -> dict[str, Any]:
    """One flat record; times in milliseconds, rates per second of wall clock."""
    good = [record for record in result.records if record.error is None]
    gaps = [gap for record in good for gap in record.gaps_s]
    ttfts = [record.ttft_s for record in good]
    output_tokens = sum(record.output_tokens for record in good)
    return {
        "workload": workload,
        "seed": seed,
        "concurrency": concurrency,
        "users": num_users,
        "requests": len(result.records),
        "errors": len(result.records) - len(good),
        "wall_s": round(result.wall_s, 3),
        "client_cpu_s": round(result.cpu_s, 3),
        "output_tokens": output_tokens,
        "output_tokens_per_s": round(output_tokens / result.wall_s, 1),
        "prompt_tokens": sum(record.prompt_tokens for record in good),
        "cached_tokens": sum(record.cached_tokens for record in good),
        "ttft_p50_ms": _ms(percentile(ttfts, 50)),
        "ttft_p95_ms": _ms(percentile(ttfts, 95)),
        "itl_p50_ms": _ms(percentile(gaps, 50)),
        "itl_p95_ms": _ms(percentile(gaps, 95)),
        "requests_per_worker": _per_worker(good),
        "error_sample": sorted({record.error for record in result.records if record.error is not None})[:3],
    }


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    table = Table(title=f"workload {summary['workload']}, {summary['users']} users, {summary['concurrency']} at a time")
    table.add_column("figure")
    table.add_column("value", justify="right")
    rows = {
        "requests (failed)": f"{summary['requests']} ({summary['errors']})",
        "output tokens/s": summary["output_tokens_per_s"],
        "TTFT p50 / p95 ms": f"{summary['ttft_p50_ms']} / {summary['ttft_p95_ms']}",
        "ITL p50 / p95 ms": f"{summary['itl_p50_ms']} / {summary['itl_p95_ms']}",
        "prompt tokens (cached)": f"{summary['prompt_tokens']} ({summary['cached_tokens']})",
        "wall s": summary["wall_s"],
        "CPU s of the load generator": summary["client_cpu_s"],
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    for worker, count in summary["requests_per_worker"].items():
        table.add_row(f"requests on {worker}", str(count))
    for error in summary["error_sample"]:
        table.add_row("[red]error[/red]", error)
    console.print(table)


def _per_worker(records: list[RequestRecord]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        if record.worker is not None:
            counts[record.worker] = counts.get(record.worker, 0) + 1
    return dict(sorted(counts.items()))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
