"""Watchword's own policy: where the first token comes soonest, in seconds, without harm to those who come after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from router.policy import Candidate, Matches, Placement, pick_lowest


@dataclass(frozen=True)
class WatchwordPolicy:
    """cost = wait + own + congestion × own × (wait + own) + slot wait + decode_weight × decode step × running requests,

    where `wait` is the prefill in front of the request and `own` the prefill of its uncached tokens, both in seconds at
    the worker's measured rate. The third term is what the request costs others: while the worker is busy with it and
    what is in front, more requests come, and each waits `own` longer. It makes computing a prefix a second time dearer
    than waiting for its holder, the more so the longer both take. Ties go to the worker with fewest requests, then at
    random.

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
        prompt, block_size = placement.num_prompt_tokens, placement.block_size_tokens
        congestion, decode_weight = self.congestion_per_s, self.decode_weight
        matched_blocks = matches.get
        costs = []
        for c in candidates:
            rate = c.prefill_tokens_per_s
            uncached = prompt - matched_blocks(c.worker_id, 0) * block_size
            own_s = (uncached if uncached > 1 else 1) / rate
            until_s = c.pending_prefill_tokens / rate + own_s
            cost = until_s * (1.0 + congestion * own_s) + c.slot_wait_s
            costs.append(cost + decode_weight * c.decode_step_s * c.num_running)
        return costs
