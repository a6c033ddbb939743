"""Watchword's own policy: where the first token comes soonest, in seconds, without harm to those who come after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from router.policy import Candidate, Matches, Placement, pick_lowest


@dataclass(frozen=True)
class WatchwordPolicy:
    """cost = (wait + own) × (1 + congestion × own) + decode_weight × decode step × running requests,

    where `wait` is the prefill in front of the request plus the wait for a slot, and `own` the prefill of its uncached
    tokens, all in seconds at the worker's measured rate. The factor is what the request costs others: while the worker
    is busy with it and what is in front, more requests come, and each waits `own` longer. It makes computing a prefix a
    second time dearer than waiting for its holder, the more so the longer both take, and the more so when even the
    least loaded worker has a queue: congestion = congestion_per_s × (1 + shortest wait in seconds). Ties go to the
    worker with fewest requests, then at random.

    No special cases are needed: a prefix nobody holds goes to the least loaded worker in tokens; a hot prefix spreads
    once waiting for its holder costs more than computing it elsewhere; a cold worker wins as soon as it is idle enough.
    """

    congestion_per_s: float = 0.3  # requests per second taken to come to a busy worker; tuned by simulation
    decode_weight: float = 1.0
    affinity_slack_s: float = 0.1  # how much later the first token may come to honour a session's wish
    name: str = "watchword"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        costs = self._costs(placement, candidates, matches)
        lowest = min(costs)
        if placement.affinity is not None:
            for candidate, cost in zip(candidates, costs, strict=True):
                if candidate.worker_id == placement.affinity and cost <= lowest + self.affinity_slack_s:
                    return candidate
        tied = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost <= lowest]
        if len(tied) == 1:
            return tied[0]
        return pick_lowest([candidate.num_running for candidate in tied], tied, random)

    def _costs(self, placement: Placement, candidates: Sequence[Candidate], matches: Matches) -> list[float]:
        prompt, block_size, decode_weight = placement.num_prompt_tokens, placement.block_size_tokens, self.decode_weight
        waits = [c.pending_prefill_tokens / c.prefill_tokens_per_s + c.slot_wait_s for c in candidates]
        congestion = self.congestion_per_s * (1.0 + min(waits))
        matched_blocks = matches.get
        costs = []
        for c, wait_s in zip(candidates, waits, strict=True):
            uncached = prompt - matched_blocks(c.worker_id, 0) * block_size
            own_s = (uncached if uncached > 1 else 1) / c.prefill_tokens_per_s
            cost = (wait_s + own_s) * (1.0 + congestion * own_s)
            costs.append(cost + decode_weight * c.decode_step_s * c.num_running)
        return costs
