"""Routers that put prefix and load into one score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from router.policy import Candidate, Matches, Placement, pick_lowest


@dataclass(frozen=True)
class LlmdPolicy:
    """llm-d's weighted sum of normalised scorers: share of the prompt that is cached, and shortness of the queue."""

    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    name: str = "llm_d"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        longest = max(c.num_running for c in candidates)
        span = longest - min(c.num_running for c in candidates)
        num_blocks = max(1, placement.num_blocks)
        costs = [
            -self.prefix_weight * matches.get(c.worker_id, 0) / num_blocks
            - self.queue_weight * ((longest - c.num_running) / span if span else 1.0)
            for c in candidates
        ]
        return pick_lowest(costs, candidates, random)


@dataclass(frozen=True)
class DynamoPolicy:
    """Dynamo's cost: prefill to be done plus KV that is being decoded, in tokens. `decode_weight` 0 leaves that out."""

    decode_weight: float = 1.0
    name: str = "dynamo"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        costs = [
            c.reserved_prefill_tokens
            + placement.uncached_tokens(matches.get(c.worker_id, 0))
            + self.decode_weight * c.num_context_tokens
            for c in candidates
        ]
        return pick_lowest(costs, candidates, random)


@dataclass(frozen=True)
class LmetricPolicy:
    """LMetric: new prefill tokens times batch size; nothing to tune."""

    name: str = "lmetric"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        costs = [
            (c.reserved_prefill_tokens + placement.uncached_tokens(matches.get(c.worker_id, 0))) * (c.num_running + 1)
            for c in candidates
        ]
        return pick_lowest(costs, candidates, random)


@dataclass(frozen=True)
class OraclePolicy:
    """The soonest first token, given exact state: the driver hands it the engines' own. Greedy, so it can be beaten."""

    name: str = "oracle"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        costs = [
            (c.pending_prefill_tokens + placement.uncached_tokens(matches.get(c.worker_id, 0))) / c.prefill_tokens_per_s
            + c.slot_wait_s
            for c in candidates
        ]
        return pick_lowest(costs, candidates, random)
