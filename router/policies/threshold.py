"""Routers that follow the prefix until a threshold on the number of requests says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, pstdev

from router.policy import Candidate, Matches, Placement, pick_lowest


def _longest(candidates: Sequence[Candidate], matches: Matches) -> tuple[int, list[Candidate]]:
    """The longest match in blocks, and the candidates that have it."""
    best = max(matches.get(c.worker_id, 0) for c in candidates)
    return best, [c for c in candidates if matches.get(c.worker_id, 0) == best]


def _least_loaded(candidates: Sequence[Candidate], random: Random) -> Candidate:
    return pick_lowest([c.num_running for c in candidates], candidates, random)


@dataclass(frozen=True)
class RayPrefixPolicy:
    """Ray Serve LLM's PrefixCacheAffinityRouter with its default, an infinite imbalance threshold: prefix only.

    Below the match rate the worker with the smallest prefix tree; of several holders the shortest queue.
    """

    match_rate_threshold: float = 0.1
    name: str = "ray_prefix"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        best, holders = _longest(candidates, matches)
        if best < self.match_rate_threshold * placement.num_blocks:
            return pick_lowest([c.num_cached_blocks for c in candidates], candidates, random)
        return _least_loaded(holders, random)


@dataclass(frozen=True)
class SglangPolicy:
    """SGLang's cache_aware with the defaults of its command line."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    name: str = "sglang"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        loads = [c.num_running for c in candidates]
        highest, lowest = max(loads), min(loads)
        is_imbalanced = highest - lowest > self.balance_abs_threshold and highest > self.balance_rel_threshold * lowest
        if not is_imbalanced:
            best, holders = _longest(candidates, matches)
            if best > self.cache_threshold * placement.num_blocks:
                return _least_loaded(holders, random)
        return _least_loaded(candidates, random)


@dataclass(frozen=True)
class AibrixPolicy:
    """AIBrix's prefix-cache: longest match first, skipping workers that are busier than the mean plus a deviation."""

    imbalance_threshold: int = 8
    deviations: float = 1.0
    name: str = "aibrix"

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate:
        loads = [c.num_running for c in candidates]
        if max(loads) - min(loads) > self.imbalance_threshold:
            return _least_loaded(candidates, random)
        limit = fmean(loads) + self.deviations * pstdev(loads)
        holders = [c for c in candidates if matches.get(c.worker_id, 0) > 0 and c.num_running <= limit]
        if not holders:
            return _least_loaded(candidates, random)
        return _least_loaded(_longest(holders, matches)[1], random)
