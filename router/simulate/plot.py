"""A picture of a comparison. Needs matplotlib, which the `experiments` extra brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.simulate.fairness import TenantComparison
from router.simulate.result import PolicyResult

_OURS = "#c03028"
_OTHERS = "#5a7fa8"
_BOUND = "#8a8a8a"


def plot_results(results: dict[str, PolicyResult], path: Path, title: str) -> None:
    """TTFT (a line from mean to p90; logarithmic) and hit rate, best policy on top. The suffix names the format.

    Raises RuntimeError when matplotlib is not installed.
    """
    names = sorted(results, key=lambda name: -results[name].ttft_mean_s)
    colours = [_OURS if name == "watchword" else _BOUND if name == "oracle" else _OTHERS for name in names]
    figure = _figure(8, 0.32 * len(names) + 1.4)
    times, hits = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    means = [results[name].ttft_mean_s for name in names]
    p90s = [results[name].ttft_p90_s for name in names]
    times.hlines(names, means, p90s, color=colours, linewidth=2)
    times.scatter(means, names, c=colours, s=28, zorder=3)
    times.scatter(p90s, names, c=colours, s=40, marker="|", zorder=3)
    times.grid(axis="x", which="both", alpha=0.25)
    times.set_xscale("log")
    times.set_xlabel("time to first token, s (dot: mean, bar: p90)")
    hits.barh(names, [results[name].hit_rate for name in names], color=colours)
    hits.set_xlim(0, 1)
    hits.set_xlabel("hit rate")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def plot_tenants(comparisons: Sequence[TenantComparison], path: Path, title: str) -> None:
    """Each tenant's TTFT (dot: mean, bar: p95; logarithmic) alone, with the others, and with admission in front.

    Raises RuntimeError when matplotlib is not installed.
    """
    figure = _figure(8, 0.6 * len(comparisons) + 1.6)
    axes = figure.subplots()
    for place, (label, colour) in enumerate(
        (("alone", _BOUND), ("together, no admission", _OTHERS), ("together, with admission", _OURS))
    ):
        runs = [(each.alone, each.unguarded, each.admitted)[place] for each in comparisons]
        rows = [each.alone.tenant + 0.22 * (place - 1) for each in comparisons]
        means, p95s = [run.ttft_mean_s for run in runs], [run.ttft_p95_s for run in runs]
        axes.hlines(rows, means, p95s, color=colour, linewidth=2, label=label)
        axes.scatter(means, rows, c=colour, s=28, zorder=3)
        axes.scatter(p95s, rows, c=colour, s=40, marker="|", zorder=3)
    axes.set_yticks(
        [each.alone.tenant for each in comparisons], [f"tenant {each.alone.tenant}" for each in comparisons]
    )
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, s (dot: mean, bar: p95)")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("plots need matplotlib: pip install 'watchword[experiments]'") from None
    figure = Figure(figsize=(width, height), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
