"""One self-contained HTML file: verdict, rate by condition, block map over time, findings. Fetches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cluster.experiment import svg
from cluster.experiment.bisect import Bisection
from cluster.experiment.block_map import Mark, block_map
from cluster.experiment.event_file import BlockEvent
from cluster.experiment.runner import ExperimentResult
from cluster.experiment.statistics import rate
from cluster.experiment.verdict import Status

_COLOUR = {Status.CLEAN: "#2a7f3f", Status.CONTAMINATED: "#c0281c", Status.VOID: "#b8860b"}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1040px;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;width:100%;margin:1rem 0;font-size:14px}
td,th{border-bottom:1px solid #ddd;padding:.3rem .5rem;text-align:left;vertical-align:top}
.banner{color:#fff;padding:.8rem 1rem;border-radius:6px}.banner b{font-size:1.4rem}
.verdict{font-weight:600}svg{margin:.5rem 0}code{background:#f3f3f3;padding:0 .2rem}
"""
_MAX_FINDINGS = 200
_MAX_REASONS = 8
_MAX_MARKS = 200
_ROW, _LABEL, _PLOT = 26.0, 300.0, 540.0


def html_report(
    results: Sequence[ExperimentResult],
    events: Sequence[BlockEvent],
    *,
    mapped: str = "",
    bisection: Bisection | None = None,
) -> str:
    """`events` are those of the condition `mapped`."""
    parts = [
        "<h1>Passphrase experiment</h1>",
        _banner(results),
        _about(results[0]),
        _table(results),
        "<h2>Contaminated rounds by condition</h2>",
        "<p>Filled points: share of rounds with any finding, with the exact 95 % interval. Hollow points: share of "
        "rounds with a foreign marker.</p>",
        _rate_plot(results),
        "" if bisection is None else _bisection(bisection),
        "<h2>Blocks over time</h2>",
        _blocks(results, events, mapped),
        _findings(results),
    ]
    head = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Passphrase experiment</title><style>{_STYLE}</style>"
    )
    return head + "".join(parts) + "</html>"


def _banner(results: Sequence[ExperimentResult]) -> str:
    """The verdict on everything: contaminated outweighs void, which outweighs clean."""
    order = (Status.CONTAMINATED, Status.VOID, Status.CLEAN)
    status = next(one for one in order if any(result.verdict.status is one for result in results))
    num_rounds = sum(len(result.rounds) for result in results)
    num_requests = sum(item.num_requests for result in results for item in result.rounds)
    hits = sum(result.verdict.any_rate.hits for result in results)
    markers = sum(result.verdict.marker_rate.hits for result in results)
    found = rate(hits, num_rounds)
    what = f"{num_requests} requests in {num_rounds} rounds: {markers} with a foreign marker, {hits} with any finding; "
    what += f"rate {found.value:.1%}, 95 % interval {found.low:.1%} to {found.high:.1%}"
    return f'<p class=banner style="background:{_COLOUR[status]}"><b>{status.name.lower()}</b><br>{what}</p>'


def _about(first: ExperimentResult) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in first.info.settings.items())
    about = f"<p>Target <code>{escape(first.info.name)}</code>, model <code>{escape(first.info.model)}</code>, "
    about += f"seed <code>{first.plan.seed}</code>. {escape(settings)}</p>"
    controls = "".join(f"<li>{escape(name)}: {escape(outcome)}</li>" for name, outcome in first.controls.items())
    return f"{about}<p>Positive controls:</p><ul>{controls}</ul>"


def _table(results: Sequence[ExperimentResult]) -> str:
    head = (
        "<tr><th>condition<th>verdict<th>rounds<th>requests<th>A in B<th>B in A<th>own marker<th>shared a step"
        "<th>rounds with a finding</tr>"
    )
    return f"<table>{head}{''.join(_row(result) for result in results)}</table>"


def _row(result: ExperimentResult) -> str:
    verdict, rounds = result.verdict, result.rounds
    own = ", ".join(f"{language} {found.hits}/{found.trials}" for language, found in verdict.own_rate.items())
    shared = "not seen" if verdict.shared_rate is None else f"{verdict.shared_rate.hits}/{verdict.shared_rate.trials}"
    status = f'<span class=verdict style="color:{_COLOUR[verdict.status]}">{verdict.status.name.lower()}</span>'
    if verdict.status is Status.VOID:
        status += "".join(f"<br>{escape(reason)}" for reason in verdict.reasons[:_MAX_REASONS])
    found = verdict.any_rate
    cells = (
        escape(result.condition),
        status,
        str(len(rounds)),
        str(sum(item.num_requests for item in rounds)),
        str(sum(item.a_in_b for item in rounds)),
        str(sum(item.b_in_a for item in rounds)),
        own,
        shared,
        f"{found.hits} ({found.low:.1%} to {found.high:.1%})",
    )
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells) + "</tr>"


def _rate_plot(results: Sequence[ExperimentResult]) -> str:
    bottom = len(results) * _ROW
    shapes = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = _LABEL + share * _PLOT
        shapes += [svg.line(x, 0, x, bottom, "#ddd"), svg.text(x, bottom + 16, f"{share:.0%}", "middle")]
    for index, result in enumerate(results):
        found, marked = result.verdict.any_rate, result.verdict.marker_rate
        y = (index + 0.5) * _ROW
        colour = _COLOUR[result.verdict.status]
        shapes += [
            svg.text(_LABEL - 10, y + 4, result.condition, "end"),
            svg.line(_LABEL + found.low * _PLOT, y, _LABEL + found.high * _PLOT, y, colour, 2.5),
            svg.circle(_LABEL + found.value * _PLOT, y, 5, colour),
            svg.ring(_LABEL + marked.value * _PLOT, y, 3, colour),
            svg.text(_LABEL + _PLOT + 14, y + 4, f"{found.hits} of {found.trials}"),
        ]
    return svg.figure(_LABEL + _PLOT + 100, bottom + 24, shapes, "contaminated rounds by condition")


def _bisection(bisection: Bisection) -> str:
    named = "undecided" if bisection.named is None else bisection.named.value
    rows = "".join(
        f"<tr><td>{escape(' + '.join(trial.switches))}<td>{trial.num_contaminated} of {trial.num_rounds}"
        f"<td>{trial.outcome.value}</tr>"
        for trial in bisection.trials
    )
    head = "<tr><th>switched<th>contaminated rounds<th>outcome</tr>"
    return f"<h2>Bisection: <code>{named}</code></h2><table>{head}{rows}</table>"


def _blocks(results: Sequence[ExperimentResult], events: Sequence[BlockEvent], mapped: str) -> str:
    if not events:
        return "<p>There are no block events: a server does not show them, and a run that goes on keeps none.</p>"
    about = (
        f"<p>{escape(mapped)}: each colour is a request, pale where it left a block in the cache. Point at a span to "
        "see whose it is. Red: where an oracle found something wrong.</p>"
    )
    findings = [finding for result in results if result.condition == mapped for finding in result.findings]
    marks = [
        Mark(finding.evidence["step"], finding.evidence.get("block"), f"{finding.request or ''} {finding.kind}")
        for finding in findings
        if finding.evidence.get("step") is not None
    ]
    return about + block_map(list(events), marks[:_MAX_MARKS])


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
