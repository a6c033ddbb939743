"""From findings to a verdict: clean, contaminated, or void because the run could not have seen anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from cluster.experiment.finding import Finding, OracleName
from cluster.experiment.statistics import Rate, rate

MIN_OWN_MARKER = 0.9
MIN_SHARED_ROUNDS = 0.9


class Status(IntEnum):
    """The values are the exit statuses of `watchword experiment`."""

    CLEAN = 0
    CONTAMINATED = 1
    VOID = 2


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The three observations of a round and whatever the oracles found in it."""

    index: int
    language: str
    a_in_b: bool
    b_in_a: bool
    own_present: dict[str, bool]  # by request, marked ones that were not aborted
    findings: tuple[Finding, ...]
    shared_step: bool | None
    num_evictions: int | None = None
    num_preemptions: int | None = None
    num_requests: int = 0

    @property
    def is_contaminated(self) -> bool:
        return bool(self.findings)

    @property
    def has_foreign_marker(self) -> bool:
        return any(finding.oracle is OracleName.MARKER for finding in self.findings)

    @property
    def had_pressure(self) -> bool:
        return bool(self.num_evictions or self.num_preemptions)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a run must show to count. The matrix creates pressure on purpose: there it is allowed, and must be seen."""

    allow_pressure: bool = False
    needs_evictions: bool = False
    needs_preemptions: bool = False
    chinese_must_obey: bool = False
    own_marker: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    status: Status
    reasons: tuple[str, ...]
    marker_rate: Rate  # rounds with a foreign marker
    any_rate: Rate  # rounds with any finding
    own_rate: dict[str, Rate] = field(default_factory=dict)  # by language
    shared_rate: Rate | None = None  # None: the target shows nothing of it


def judge(results: Sequence[RoundResult], requirements: Requirements, failed_controls: Sequence[str] = ()) -> Verdict:
    """Contamination outweighs void: a leak that was seen is a leak, however weak the run."""
    own_rate = {language: _own_rate(results, language) for language in sorted({item.language for item in results})}
    shared_rate = _shared_rate(results)
    void = [
        *(f"positive control failed: {control}" for control in failed_controls),
        *_own_marker_reasons(own_rate, requirements),
        *_sharing_reasons(shared_rate),
        *_pressure_reasons(results, requirements),
    ]
    findings = [finding for result in results for finding in result.findings]
    marker_rate = rate(sum(result.has_foreign_marker for result in results), len(results))
    any_rate = rate(sum(result.is_contaminated for result in results), len(results))
    if findings:
        status, reasons = Status.CONTAMINATED, [str(finding) for finding in findings[:20]] + void
    elif void:
        status, reasons = Status.VOID, void
    else:
        status, reasons = Status.CLEAN, []
    return Verdict(status, tuple(reasons), marker_rate, any_rate, own_rate, shared_rate)


def _own_rate(results: Sequence[RoundResult], language: str) -> Rate:
    present = [value for item in results if item.language == language for value in item.own_present.values()]
    return rate(sum(present), len(present))


def _shared_rate(results: Sequence[RoundResult]) -> Rate | None:
    seen = [result.shared_step for result in results if result.shared_step is not None]
    return rate(sum(seen), len(seen)) if seen else None


def _own_marker_reasons(own_rate: dict[str, Rate], requirements: Requirements) -> list[str]:
    if not requirements.own_marker:
        return []
    binding = {"en", "zh"} if requirements.chinese_must_obey else {"en"}
    return [
        f"own marker in only {found.hits} of {found.trials} answers ({language}), wanted {MIN_OWN_MARKER:.0%}"
        for language, found in own_rate.items()
        if language in binding and found.value < MIN_OWN_MARKER
    ]


def _sharing_reasons(shared_rate: Rate | None) -> list[str]:
    if shared_rate is None:
        return ["nothing shows whether the requests of a round ran together"]
    if shared_rate.value >= MIN_SHARED_ROUNDS:
        return []
    return [
        f"requests shared a step in only {shared_rate.hits} of {shared_rate.trials} rounds, "
        f"wanted {MIN_SHARED_ROUNDS:.0%}"
    ]


def _pressure_reasons(results: Sequence[RoundResult], requirements: Requirements) -> list[str]:
    pressed = [result.index for result in results if result.had_pressure]
    if requirements.allow_pressure:
        return _missing_pressure(results, requirements)
    if not pressed:
        return []
    return [f"blocks were evicted or requests preempted in {len(pressed)} rounds (first: round {pressed[0]})"]


def _missing_pressure(results: Sequence[RoundResult], requirements: Requirements) -> list[str]:
    reasons = []
    if requirements.needs_evictions and not any(result.num_evictions for result in results):
        reasons.append("no block was evicted, though the pool was meant to be too small")
    if requirements.needs_preemptions and not any(result.num_preemptions for result in results):
        reasons.append("no request was preempted, though the pool was meant to be too small")
    return reasons
