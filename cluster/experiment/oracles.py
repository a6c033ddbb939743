"""The three oracles: a foreign marker, a difference from the solo run, a broken structural law.

Each takes what a target observed in one round and returns findings; none of them talks to an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cluster.experiment.finding import Finding, OracleName
from cluster.experiment.markers import MarkerRegistry
from cluster.experiment.observation import Observation, RoundObservation, TokenTrace
from cluster.experiment.plan import PlannedRequest, Round


class Oracle(Protocol):
    async def judge(self, planned: Round, seen: RoundObservation) -> list[Finding]: ...


class SoloReference(Protocol):
    """The same request alone on an empty, clean engine. Answers are remembered: they never change."""

    async def solo(self, request: PlannedRequest) -> Observation: ...


class MarkerOracle:
    """Searches everything that came back for every marker issued so far in the run."""

    def __init__(self, registry: MarkerRegistry) -> None:
        self._registry = registry

    async def judge(self, planned: Round, seen: RoundObservation) -> list[Finding]:
        for request in planned.requests:
            self._registry.register(request.marker, request.name)
        return [finding for request in planned.requests for finding in self._judge_one(planned, request, seen)]

    def _judge_one(self, planned: Round, request: PlannedRequest, seen: RoundObservation) -> Iterator[Finding]:
        observation = seen.by_name.get(request.name)
        if observation is None:
            return
        for sighting in self._registry.search(observation.searchable, ignore=[request.marker]):
            is_in_text = sighting.marker in observation.text
            yield Finding(
                OracleName.MARKER,
                "foreign_marker",
                planned.index,
                request.name,
                f"holds the marker of {sighting.owner} ({sighting.form.value})",
                {"owner": sighting.owner, "form": sighting.form.value, "is_in_text": is_in_text},
            )


def own_marker_present(request: PlannedRequest, observation: Observation) -> bool:
    """In whatever case or spacing, but in one piece."""
    registry = MarkerRegistry.holding(request.marker)
    return any(sighting.form.is_in_one_piece for sighting in registry.search(observation.text))


class ExactnessOracle:
    """Tokens, logprobs, finish reason and text equal those of the solo run, bit for bit."""

    def __init__(self, reference: SoloReference) -> None:
        self._reference = reference

    async def judge(self, planned: Round, seen: RoundObservation) -> list[Finding]:
        findings = []
        for request in planned.requests:
            observation = seen.by_name.get(request.name)
            if observation is not None:
                solo = await self._reference.solo(request)
                finding = compare_with_solo(planned.index, request.name, observation, solo)
                findings += [finding] if finding else []
        return findings


def compare_with_solo(round_index: int, name: str, seen: Observation, solo: Observation) -> Finding | None:
    """The first way in which an observation differs from the solo run, from the engine outwards; None when equal.

    The order tells the layers apart: other tokens delivered than were made; else other logits; else another choice
    from equal logits, another end, or another text from equal tokens.
    """

    def finding(kind: str, detail: str, **evidence: object) -> Finding:
        index = evidence.get("output_index")
        if isinstance(index, int) and index < len(seen.token_steps):
            evidence["step"] = seen.token_steps[index]
        return Finding(OracleName.EXACTNESS, kind, round_index, name, detail, evidence)

    made, expected = seen.engine_tokens or (), solo.engine_tokens or ()
    if seen.tokens is not None and seen.tokens != made and not seen.was_aborted:
        return finding("delivery", "other tokens were delivered than the engine made for this request")
    if seen.error != solo.error:
        return finding("error", f"ended with {seen.error!r}, alone with {solo.error!r}")
    for index, (mine, alone) in enumerate(zip(made, expected, strict=False)):
        if _logits_differ(mine, alone):
            return finding("logits", f"output token {index} came from other logits than alone", output_index=index)
        if mine.token_id != alone.token_id:
            return finding("choice", f"output token {index} differs though its logits are equal", output_index=index)
        if len(mine.top) != len(alone.top):
            return finding("choice", f"output token {index} was drawn under other settings", output_index=index)
    if seen.was_aborted:
        return None
    if not _agree(seen.text, solo.text):
        # Asked before the length: stop strings are looked for in the text, so a wrong text can end an answer.
        return finding("text", "the same tokens became another text than alone")
    if len(made) != len(expected) or seen.finish_reason != solo.finish_reason:
        detail = f"{len(made)} tokens ending in {seen.finish_reason}, alone {len(expected)} in {solo.finish_reason}"
        return finding("length", detail, output_index=min(len(made), len(expected)))
    if seen.text != solo.text:
        return finding("text", "the same tokens became another text than alone")
    return None


def _agree(one: str, other: str) -> bool:
    """Equal as far as both go; an unfinished character at an end is no difference."""
    one, other = one.rstrip("\ufffd"), other.rstrip("\ufffd")
    return one.startswith(other) or other.startswith(one)


def _logits_differ(mine: TokenTrace, alone: TokenTrace) -> bool:
    """Equal alternatives mean equal logits; the chosen token's own logprob counts only for the same token."""
    if any(here != there for here, there in zip(mine.top, alone.top, strict=False)):
        return True
    return mine.token_id == alone.token_id and mine.logprob != alone.logprob


class StructureOracle:
    """Whatever the engine's own checks and counters reported. On a clean engine every one of them stays at zero."""

    def __init__(self, alarm_counters: frozenset[str]) -> None:
        self._alarm_counters = alarm_counters

    async def judge(self, planned: Round, seen: RoundObservation) -> list[Finding]:
        findings = [
            Finding(
                OracleName.STRUCTURE,
                violation.kind,
                planned.index,
                violation.request,
                violation.detail,
                {"step": violation.step, "block": violation.block},
            )
            for violation in seen.violations
        ]
        for name in sorted(self._alarm_counters & seen.counters.keys()):
            if count := seen.counters[name]:
                detail = f"counter {name} rose by {count}"
                findings.append(Finding(OracleName.COUNTER, name, planned.index, None, detail, {"count": count}))
        return findings
