"""An experiment as JSON: everything needed to judge it again, and the plan to replay it. No prompt or answer text."""

from __future__ import annotations

from typing import Any

from cluster.experiment.finding import Finding
from cluster.experiment.runner import ExperimentResult
from cluster.experiment.statistics import Rate
from cluster.experiment.verdict import RoundResult

SCHEMA = 1


def experiment_record(result: ExperimentResult) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "schema": SCHEMA,
        "condition": result.condition,
        "target": result.info.name,
        "model": result.info.model,
        "settings": result.info.settings,
        "seed": result.plan.seed,
        "verdict": verdict.status.name.lower(),
        "exit_status": int(verdict.status),
        "reasons": list(verdict.reasons),
        "marker_rate": _rate(verdict.marker_rate),
        "any_rate": _rate(verdict.any_rate),
        "own_rate": {language: _rate(found) for language, found in verdict.own_rate.items()},
        "shared_rate": None if verdict.shared_rate is None else _rate(verdict.shared_rate),
        "controls": result.controls,
        "rounds": [_round(item) for item in result.rounds],
    }


def finding_record(finding: Finding) -> dict[str, Any]:
    return {
        "oracle": finding.oracle.value,
        "kind": finding.kind,
        "round": finding.round_index,
        "request": finding.request,
        "detail": finding.detail,
        "evidence": dict(finding.evidence),
    }


def _rate(found: Rate) -> dict[str, float]:
    return {"hits": found.hits, "trials": found.trials, "rate": found.value, "low": found.low, "high": found.high}


def _round(item: RoundResult) -> dict[str, Any]:
    return {
        "index": item.index,
        "language": item.language,
        "a_in_b": item.a_in_b,
        "b_in_a": item.b_in_a,
        "own_present": item.own_present,
        "shared_step": item.shared_step,
        "evictions": item.num_evictions,
        "preemptions": item.num_preemptions,
        "requests": item.num_requests,
        "findings": [finding_record(finding) for finding in item.findings],
    }
