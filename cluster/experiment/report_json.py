"""An experiment as JSON: everything needed to judge it again, and the plan to replay it. No prompt or answer text."""

from __future__ import annotations

from typing import Any

from cluster.experiment.bisect import Bisection
from cluster.experiment.finding import Finding, OracleName
from cluster.experiment.plan import Plan
from cluster.experiment.runner import ExperimentResult
from cluster.experiment.statistics import Rate
from cluster.experiment.targets.target import TargetInfo
from cluster.experiment.verdict import RoundResult, Status, Verdict

SCHEMA = 1


def experiment_record(result: ExperimentResult) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "schema": SCHEMA,
        "condition": result.condition,
        "target": result.info.name,
        "model": result.info.model,
        "sees_steps": result.info.sees_steps,
        "settings": result.info.settings,
        "seed": result.plan.seed,
        "verdict": verdict.status.name.lower(),
        "exit_status": int(verdict.status),
        "reasons": list(verdict.reasons),
        "marker_rate": _rate(verdict.marker_rate),
        "any_rate": _rate(verdict.any_rate),
        "own_rate": {language: _rate(found) for language, found in verdict.own_rate.items()},
        "own_rate_by_wording": {wording: _rate(found) for wording, found in result.own_by_wording.items()},
        "shared_rate": None if verdict.shared_rate is None else _rate(verdict.shared_rate),
        "controls": result.controls,
        "rounds": [_round(item) for item in result.rounds],
    }


def experiment_from_record(record: dict[str, Any], plan: Plan) -> ExperimentResult:
    """The way back; `plan` is the one that was run."""
    shared = record["shared_rate"]
    verdict = Verdict(
        Status[record["verdict"].upper()],
        tuple(record["reasons"]),
        _rate_from(record["marker_rate"]),
        _rate_from(record["any_rate"]),
        {language: _rate_from(found) for language, found in record["own_rate"].items()},
        None if shared is None else _rate_from(shared),
    )
    info = TargetInfo(record["target"], record["model"], record["sees_steps"], record["settings"])
    rounds = tuple(_round_from(item) for item in record["rounds"])
    return ExperimentResult(record["condition"], info, plan, rounds, verdict, record["controls"])


def bisection_record(bisection: Bisection) -> dict[str, Any]:
    trials = [
        {
            "switches": list(trial.switches),
            "outcome": trial.outcome.value,
            "rounds": trial.num_rounds,
            "contaminated": trial.num_contaminated,
        }
        for trial in bisection.trials
    ]
    return {"component": None if bisection.named is None else bisection.named.value, "trials": trials}


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


def _rate_from(record: dict[str, Any]) -> Rate:
    return Rate(record["hits"], record["trials"], record["low"], record["high"])


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


def _round_from(record: dict[str, Any]) -> RoundResult:
    return RoundResult(
        index=record["index"],
        language=record["language"],
        a_in_b=record["a_in_b"],
        b_in_a=record["b_in_a"],
        own_present=record["own_present"],
        findings=tuple(_finding_from(finding) for finding in record["findings"]),
        shared_step=record["shared_step"],
        num_evictions=record["evictions"],
        num_preemptions=record["preemptions"],
        num_requests=record["requests"],
    )


def _finding_from(record: dict[str, Any]) -> Finding:
    oracle = OracleName(record["oracle"])
    return Finding(oracle, record["kind"], record["round"], record["request"], record["detail"], record["evidence"])
