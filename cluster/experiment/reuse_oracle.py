"""Who took whose blocks: the engine's event log held against the plan, which knows who sent what.

The engine's own check compares scopes, and believes them. A front door that writes the wrong user or session into a
scope deceives it; it does not deceive the plan.
"""

from __future__ import annotations

from cluster.experiment.finding import Finding, OracleName
from cluster.experiment.observation import Reuse, RoundObservation
from cluster.experiment.plan import PlannedRequest, Round

FOREIGN_REUSE = "foreign_reuse"
USER_BOUNDARY, SESSION_BOUNDARY = "user", "session"
_NARROW = (None, "USER", "SESSION")  # scopes whose blocks never leave their user


class ReuseOracle:
    """Remembers the callers of all rounds so far: a block may have been written long ago."""

    def __init__(self) -> None:
        self._callers: dict[str, PlannedRequest] = {}

    async def judge(self, planned: Round, seen: RoundObservation) -> list[Finding]:
        self._callers.update({request.name: request for request in planned.requests})
        found = ((reuse, self._boundary(reuse)) for reuse in seen.reuses)
        return [_finding(planned.index, reuse, boundary) for reuse, boundary in found if boundary is not None]

    def _boundary(self, reuse: Reuse) -> str | None:
        """What was crossed, or None. Blocks that no planned request wrote are the engine's own check's matter."""
        reader, writer = self._callers.get(reuse.reader), self._callers.get(reuse.writer or "")
        if reuse.scope not in _NARROW or reader is None or writer is None:
            return None
        if reader.user != writer.user:
            return USER_BOUNDARY
        return SESSION_BOUNDARY if reader.session != writer.session else None


def _finding(round_index: int, reuse: Reuse, boundary: str) -> Finding:
    detail = f"took block {reuse.block}, written for {reuse.writer} of another {boundary}, at step {reuse.step}"
    evidence = {"owner": reuse.writer, "step": reuse.step, "block": reuse.block, "boundary": boundary}
    return Finding(OracleName.STRUCTURE, FOREIGN_REUSE, round_index, reuse.reader, detail, evidence)
