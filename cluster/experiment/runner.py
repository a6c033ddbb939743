"""The passphrase experiment: send a plan's rounds to a target, let the oracles judge, and reach a verdict."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.experiment.finding import Finding, OracleName
from cluster.experiment.markers import MarkerRegistry
from cluster.experiment.observation import RoundObservation
from cluster.experiment.oracles import MarkerOracle, Oracle, own_marker_present
from cluster.experiment.plan import Plan, PlannedRequest, Round
from cluster.experiment.statistics import Rate, rate
from cluster.experiment.targets.target import Target, TargetInfo
from cluster.experiment.verdict import Requirements, RoundResult, Verdict, judge

Progress = Callable[[RoundResult], None]


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """Everything that a report needs; the plan makes it replayable."""

    condition: str
    info: TargetInfo
    plan: Plan
    rounds: tuple[RoundResult, ...]
    verdict: Verdict
    controls: dict[str, str]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for result in self.rounds for finding in result.findings)

    @property
    def own_by_wording(self) -> dict[str, Rate]:
        """How often each wording was obeyed: answers that hold their own marker."""
        present: dict[str, list[bool]] = {}
        for item in self.rounds:
            present.setdefault(self.plan.workload.wording_of(item.index), []).extend(item.own_present.values())
        return {name: rate(sum(values), len(values)) for name, values in present.items()}


async def run_experiment(
    target: Target,
    plan: Plan,
    *,
    oracles: Sequence[Oracle] = (),
    requirements: Requirements | None = None,
    condition: str = "baseline",
    progress: Progress | None = None,
    stop_at_first: bool = False,
) -> ExperimentResult:
    """Runs all rounds (or up to the first finding). The marker oracle is always on; `oracles` are added to it."""
    judges: list[Oracle] = [MarkerOracle(MarkerRegistry(random.Random(plan.seed))), *oracles]
    results = []
    for planned in plan.rounds:
        result = await judge_round(planned, await target.run_round(planned), judges)
        results.append(result)
        if progress is not None:
            progress(result)
        if stop_at_first and result.is_contaminated:
            break
    controls, failed = await _controls(target, plan)
    verdict = judge(results, requirements or Requirements(), failed)
    return ExperimentResult(condition, target.info, plan, tuple(results), verdict, controls)


async def judge_round(planned: Round, seen: RoundObservation, oracles: Sequence[Oracle]) -> RoundResult:
    findings = [finding for oracle in oracles for finding in await oracle.judge(planned, seen)]
    marked = planned.marked
    return RoundResult(
        index=planned.index,
        language=marked[0].language,
        a_in_b=_holds(findings, reader=marked[1], owner=marked[0]),
        b_in_a=_holds(findings, reader=marked[0], owner=marked[1]),
        own_present={
            request.name: own_marker_present(request, seen.by_name[request.name])
            for request in marked
            if request.name in seen.by_name and not seen.by_name[request.name].was_aborted
        },
        findings=tuple(findings),
        shared_step=seen.shared_step,
        num_evictions=seen.num_evictions,
        num_preemptions=seen.num_preemptions,
        num_requests=len(planned.requests),
    )


def _holds(findings: Sequence[Finding], reader: PlannedRequest, owner: PlannedRequest) -> bool:
    return any(
        finding.oracle is OracleName.MARKER
        and finding.request == reader.name
        and finding.evidence["owner"] == owner.name
        for finding in findings
    )


async def _controls(target: Target, plan: Plan) -> tuple[dict[str, str], list[str]]:
    """Can the run see anything at all? Returns what to report, and the names of the controls that failed."""
    reuse = await target.reuse_control()
    sees = _search_sees(plan)
    controls = {
        "same user, same prompt: cached tokens": str(reuse.num_cached_tokens),
        "search finds a foreign marker that is there": str(sees),
    }
    failed = ["a repeated prompt of one user was not served from the prefix cache"] if reuse.failed else []
    failed += [] if sees else ["the search did not find a foreign marker that was there"]
    return controls, failed


def _search_sees(plan: Plan) -> bool:
    """A's answer with B's marker written into it must be reported; this is the search's own positive control."""
    first, second = plan.rounds[0].marked[:2]
    registry = MarkerRegistry.holding(first.marker, second.marker)
    return bool(registry.search(f"{first.marker}. {second.marker}", ignore=[first.marker]))
