"""Placement without regard to prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.policy import Candidate, Matches, Placement, pick_lowest


class RandomPolicy:
    name = "random"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        return candidates[random.randrange(len(candidates))]


class RoundRobinPolicy:
    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class PowerOfTwoPolicy:
    """Ray Serve's default: of two workers drawn at random, the one with fewer requests."""

    name = "power_of_two"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        if len(candidates) == 1:
            return candidates[0]
        first, second = random.sample(candidates, 2)
        return first if first.num_running <= second.num_running else second


class LeastRequestsPolicy:
    name = "least_requests"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        return pick_lowest([c.num_running for c in candidates], candidates, random)


class LeastTokensPolicy:
    """Fewest prompt tokens waiting to be computed: sees the length of prompts, not their content."""

    name = "least_tokens"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        return pick_lowest([c.reserved_prefill_tokens for c in candidates], candidates, random)
