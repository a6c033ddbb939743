"""One self-contained HTML file: verdict, rate by condition, block map over time, findings. Fetches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cluster.experiment import svg
from cluster.experiment.block_map import block_map
from cluster.experiment.event_file import BlockEvent
from cluster.experiment.runner import ExperimentResult
from cluster.experiment.verdict import Status

_COLOUR = {Status.CLEAN: "#2a7f3f", Status.CONTAMINATED: "#c0281c", Status.VOID: "#b8860b"}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1040px;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;width:100%;margin:1rem 0}
td,th{border-bottom:1px solid #ddd;padding:.3rem .5rem;text-align:left}
.verdict{font-size:1.3rem;font-weight:600}svg{margin:.5rem 0}code{background:#f3f3f3;padding:0 .2rem}
"""
_MAX_FINDINGS = 200
_ROW, _LABEL, _PLOT = 24.0, 300.0, 560.0


def html_report(results: Sequence[ExperimentResult], events: Sequence[BlockEvent]) -> str:
    """`events` are those of the first condition."""
    parts = [
        "<h1>Passphrase experiment</h1>",
        _verdicts(results),
        "<h2>Contaminated rounds by condition</h2>",
        "<p>Points: share of rounds with any finding; bars: exact 95 % interval.</p>",
        _rate_plot(results),
        "<h2>Blocks over time</h2>",
        f"<p>{escape(results[0].condition)}: each colour is a request, pale where it left a block in the cache.</p>",
        block_map(list(events)) if events else "<p>This target shows no block events.</p>",
        _findings(results),
    ]
    head = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Passphrase experiment</title><style>{_STYLE}</style>"
    )
    return head + "".join(parts) + "</html>"


def _verdicts(results: Sequence[ExperimentResult]) -> str:
    rows = [_verdict_row(result) for result in results]
    first = results[0]
    settings = ", ".join(f"{name} {value}" for name, value in first.info.settings.items())
    about = f"<p>Target <code>{escape(first.info.name)}</code>, model <code>{escape(first.info.model)}</code>, "
    about += f"seed <code>{first.plan.seed}</code>. {escape(settings)}</p>"
    head = "<tr><th>condition<th>verdict<th>rounds<th>requests<th>A in B<th>B in A<th>own marker<th>shared a step</tr>"
    return f"{about}<table>{head}{''.join(rows)}</table>"


def _verdict_row(result: ExperimentResult) -> str:
    verdict, rounds = result.verdict, result.rounds
    own = ", ".join(f"{language} {found.hits}/{found.trials}" for language, found in verdict.own_rate.items())
    shared = "not seen" if verdict.shared_rate is None else f"{verdict.shared_rate.hits}/{verdict.shared_rate.trials}"
    status = f'<span class=verdict style="color:{_COLOUR[verdict.status]}">{verdict.status.name.lower()}</span>'
    cells = (
        escape(result.condition),
        status,
        str(len(rounds)),
        str(sum(item.num_requests for item in rounds)),
        str(sum(item.a_in_b for item in rounds)),
        str(sum(item.b_in_a for item in rounds)),
        own,
        shared,
    )
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells) + "</tr>"


def _rate_plot(results: Sequence[ExperimentResult]) -> str:
    shapes = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = _LABEL + share * _PLOT
        shapes += [
            svg.line(x, 0, x, len(results) * _ROW, "#eee"),
            svg.text(x, len(results) * _ROW + 16, f"{share:.0%}", "middle"),
        ]
    for index, result in enumerate(results):
        found = result.verdict.any_rate
        y = (index + 0.5) * _ROW
        colour = _COLOUR[result.verdict.status]
        shapes += [
            svg.text(_LABEL - 8, y + 4, result.condition, "end"),
            svg.line(_LABEL + found.low * _PLOT, y, _LABEL + found.high * _PLOT, y, colour, 3),
            svg.circle(_LABEL + found.value * _PLOT, y, 5, colour),
            svg.text(_LABEL + _PLOT + 12, y + 4, f"{found.hits}/{found.trials}"),
        ]
    return svg.figure(_LABEL + _PLOT + 90, len(results) * _ROW + 24, shapes, "contaminated rounds by condition")


def _findings(results: Sequence[ExperimentResult]) -> str:
    lines = [(result.condition, finding) for result in results for finding in result.findings]
    if not lines:
        return "<h2>Findings</h2><p>None.</p>"
    rows = "".join(
        f"<tr><td>{escape(condition)}<td>{finding.round_index}<td>{escape(finding.request or '')}"
        f"<td>{finding.oracle.value}<td>{escape(finding.kind)}<td>{escape(finding.detail)}</tr>"
        for condition, finding in lines[:_MAX_FINDINGS]
    )
    more = f"<p>{len(lines) - _MAX_FINDINGS} more in the JSON report.</p>" if len(lines) > _MAX_FINDINGS else ""
    head = "<tr><th>condition<th>round<th>request<th>oracle<th>kind<th>detail</tr>"
    return f"<h2>Findings ({len(lines)})</h2><table>{head}{rows}</table>{more}"
