"""Consistent hashing with bounded load: where a caller's prefixes are, without asking anyone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from router.policy import Candidate, Matches, Placement


@dataclass(frozen=True)
class ConsistentHashPolicy:
    """A caller's requests go to the same worker while it has no more than its share of the requests.

    Workers are ranked by a hash of caller and worker (rendezvous hashing): everybody comes to the same choice without
    talking, and a worker that goes moves nobody but its own callers.
    """

    load_factor: float = 1.25  # a worker takes at most this times the mean number of requests
    name: str = "consistent_hash"

    def __post_init__(self) -> None:
        if not 1.0 < self.load_factor <= 100.0:
            raise ValueError(f"load_factor is {self.load_factor}, allowed are values above 1 up to 100")

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        total = sum(candidate.num_running for candidate in candidates) + 1
        limit = math.ceil(self.load_factor * total / len(candidates))
        # Some worker is always below: the limit exceeds the mean.
        below = (candidate for candidate in candidates if candidate.num_running < limit)
        return max(below, key=lambda candidate: _rank(placement.caller, candidate))


def _rank(caller: bytes, candidate: Candidate) -> bytes:
    return blake2b(candidate.worker_id.encode(), key=blake2b(caller, digest_size=16).digest(), digest_size=8).digest()
