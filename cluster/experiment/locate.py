"""Names the component behind a contamination from what was seen: findings, counters, and what made it go away.

Knows nothing of which fault was planted; the same rules serve a real contamination.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.experiment.bisect import ALONE, BATCHING, LAYOUT, PREFIX_CACHE, PRESSURE
from cluster.experiment.component import Component
from cluster.experiment.finding import Finding, OracleName
from cluster.experiment.reuse_oracle import FOREIGN_REUSE, SESSION_BOUNDARY
from cluster.experiment.targets.indexed_group import STALE_HITS
from cluster.experiment.targets.round_driver import FAILED_ASSERTION
from workers.config import Layout

_OF_COUNTER = {
    STALE_HITS: Component.INDEX,
    "checksum_failures": Component.BLOCK_POOL,
}
_OF_STRUCTURE = {
    "sampling": Component.SAMPLER,
    "content": Component.KEY,
    "reused": Component.BLOCK_POOL,
    "shared_write": Component.BLOCK_POOL,
    "conservation": Component.BLOCK_POOL,
    "position": Component.SCHEDULER,
    "table": Component.SCHEDULER,
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """`cleared` are the switches that made it go away alone. `depends_on_neighbours`: whether the corrupted logits
    change with the content of the neighbours, their lengths kept; None when it was not tried."""

    findings: tuple[Finding, ...]
    cleared: frozenset[str]
    layout: Layout
    depends_on_neighbours: bool | None = None

    @property
    def boundaries(self) -> frozenset[str]:
        """What shared blocks crossed, where the event log shows whose they were."""
        return frozenset(
            str(finding.evidence["boundary"]) for finding in self.findings if finding.kind == FOREIGN_REUSE
        )

    def kinds(self, oracle: OracleName) -> frozenset[str]:
        return frozenset(finding.kind for finding in self.findings if finding.oracle is oracle)


def locate(evidence: Evidence) -> Component | None:
    """None when the evidence does not decide."""
    return _by_structure(evidence) or _by_counter(evidence) or _by_exactness(evidence)


def _by_counter(evidence: Evidence) -> Component | None:
    counters = evidence.kinds(OracleName.COUNTER)
    if "checksum_failures" in counters and evidence.cleared & {LAYOUT, ALONE}:
        return Component.LAYOUT_MASK  # a neighbour's row wrote into the shared block
    named = _first(_OF_COUNTER.get(name) for name in sorted(counters))
    if named is not None:
        return named
    if counters & {"verify_failures", "publish_conflicts"}:
        # A key that leads to other content: left over from an eviction, or badly derived.
        return Component.PREFIX_CACHE if PRESSURE in evidence.cleared else Component.KEY
    return None


def _by_structure(evidence: Evidence) -> Component | None:
    kinds = evidence.kinds(OracleName.STRUCTURE)
    if evidence.boundaries == {SESSION_BOUNDARY}:
        return Component.SESSION  # every block that changed hands stayed with its user
    if PRESSURE in evidence.cleared and kinds & {"table", "content", "foreign", "shared_write"}:
        return Component.BLOCK_POOL  # a wrong key needs no full pool; a block that was taken away does
    if "table" in kinds and PREFIX_CACHE in evidence.cleared:
        return Component.KEY  # a hit named the same block twice
    if "shared_write" in kinds and PREFIX_CACHE in evidence.cleared and not kinds & {"reused", "conservation"}:
        return Component.PREFIX_CACHE  # a block was written after it could be found
    named = _first(_OF_STRUCTURE.get(kind) for kind in _OF_STRUCTURE if kind in kinds)
    if named is not None:
        return named
    if kinds & {"foreign", FOREIGN_REUSE}:
        return Component.KEY if PREFIX_CACHE in evidence.cleared else Component.BLOCK_POOL
    if "unwritten" in kinds:
        return Component.PREFIX_CACHE if PREFIX_CACHE in evidence.cleared else Component.SCHEDULER
    if "assertion" in kinds:
        details = (finding.detail for finding in evidence.findings if finding.kind == "assertion")
        return Component.STREAM if any(text.startswith(FAILED_ASSERTION) for text in details) else Component.BLOCK_POOL
    return None


def _by_exactness(evidence: Evidence) -> Component | None:
    kinds = evidence.kinds(OracleName.EXACTNESS)
    if kinds & {"delivery", "error"}:
        return Component.STREAM
    if "logits" in kinds:
        return _by_logits(evidence)
    if kinds & {"choice", "length"}:
        return Component.SCHEDULER if PRESSURE in evidence.cleared else Component.SAMPLER
    return Component.DETOKENIZER if "text" in kinds else None


def _by_logits(evidence: Evidence) -> Component | None:
    cleared = evidence.cleared
    if PRESSURE in cleared:
        return Component.SCHEDULER
    if LAYOUT in cleared and evidence.layout is Layout.PADDED:
        return Component.LAYOUT_MASK  # only padding differs
    if cleared & {LAYOUT, BATCHING, ALONE}:
        if evidence.depends_on_neighbours is None:
            return None
        return Component.LAYOUT_MASK if evidence.depends_on_neighbours else Component.POSITIONS
    # A wrong position needs no neighbour: it shows wherever a prefill does not begin at the start.
    return Component.PREFIX_CACHE if PREFIX_CACHE in cleared else Component.POSITIONS


def _first(candidates: Iterable[Component | None]) -> Component | None:
    return next((candidate for candidate in candidates if candidate is not None), None)
