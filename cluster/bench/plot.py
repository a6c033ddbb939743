"""A comparison as a bar chart: throughput and time to first token by workload and server."""

from __future__ import annotations

from pathlib import Path

from cluster.bench.compare import Comparison

_FIGURES = (
    ("output_tokens_per_s", "output tokens/s (more is better)"),
    ("ttft_p50_ms", "TTFT p50, ms (less is better)"),
)


def plot_comparisons(comparisons: list[Comparison], path: Path) -> None:
    """Writes a PNG. Needs matplotlib (extra `experiments`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(_FIGURES), len(comparisons), figsize=(4.5 * len(comparisons), 6), squeeze=False, layout="constrained"
    )
    for column, comparison in enumerate(comparisons):
        names = list(comparison.rounds)
        for row, (key, title) in enumerate(_FIGURES):
            axis = axes[row][column]
            values = [comparison.median(name, key) for name in names]
            colours = ["#2a6f97" if name.startswith("watchword") else "#b8b8b8" for name in names]
            bars = axis.barh(names[::-1], values[::-1], color=colours[::-1])
            axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
            axis.set_title(f"{comparison.workload}: {title}", fontsize=9)
            axis.tick_params(labelsize=8)
            axis.margins(x=0.15)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
