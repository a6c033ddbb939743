"""Watchword's own policy: the worker on which the first token comes soonest, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from router.policy import Candidate, Matches, Placement, pick_lowest


@dataclass(frozen=True)
class WatchwordPolicy:
    """cost = (pending + uncached) / rate + slot wait + decode_weight × decode step × running requests.

    `uncached_weight` > 1 counts the request's own tokens more than the wait in front of them: computing a prefix again
    costs this request its time and every later request on that worker the same time.
    Nothing else is needed: a prefix nobody holds goes to the least loaded worker in tokens; a hot prefix spreads once
    the wait for its holder exceeds the cost of computing it elsewhere; a cold worker wins as soon as it is idle enough.
    """

    uncached_weight: float = 1.0
    decode_weight: float = 1.0
    affinity_slack_s: float = 0.1  # how much later the first token may come to honour a session's wish
    name: str = "watchword"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        prompt, block_size = placement.num_prompt_tokens, placement.block_size_tokens
        weight, decode_weight = self.uncached_weight, self.decode_weight
        matched_blocks = matches.get
        costs = [
            (c.pending_prefill_tokens + weight * max(1, prompt - matched_blocks(c.worker_id, 0) * block_size))
            / c.prefill_tokens_per_s
            + c.slot_wait_s
            + decode_weight * c.decode_step_s * c.num_running
            for c in candidates
        ]
        if placement.affinity is not None:
            limit = min(costs) + self.affinity_slack_s
            for candidate, cost in zip(candidates, costs, strict=True):
                if candidate.worker_id == placement.affinity and cost <= limit:
                    return candidate
        return pick_lowest(costs, candidates, random)
