"""A picture of a comparison. Needs matplotlib, which the `experiments` extra brings."""

from __future__ import annotations

from pathlib import Path

from router.simulate.result import PolicyResult

_OURS = "#c03028"
_OTHERS = "#5a7fa8"
_BOUND = "#8a8a8a"


def plot_results(results: dict[str, PolicyResult], path: Path, title: str) -> None:
    """TTFT (a line from mean to p90; logarithmic) and hit rate, best policy on top. The suffix names the format.

    Raises RuntimeError when matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("plots need matplotlib: pip install 'watchword[experiments]'") from None
    names = sorted(results, key=lambda name: -results[name].ttft_mean_s)
    colours = [_OURS if name == "watchword" else _BOUND if name == "oracle" else _OTHERS for name in names]
    figure = Figure(figsize=(8, 0.32 * len(names) + 1.4), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
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
