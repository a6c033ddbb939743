"""What a placement policy sees and answers. Pure: no clock, no I/O, no state of the router; randomness is passed in.

The router and the simulator drive the same policies: both fill `Candidate` records and call `choose`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from cluster.api.ids import WorkerId


@dataclass(slots=True)
class Candidate:
    """What is believed of one worker at the moment of a decision. Token counts are of prompts, rates per second."""

    worker_id: WorkerId
    max_num_seqs: int
    num_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float = 0.0
    pending_prefill_tokens: float = 0.0  # still to be computed before a new request's first token, progress deducted
    reserved_prefill_tokens: float = 0.0  # the same without the progress of the prefill that is under way
    num_running: int = 0  # requests placed and not finished, waiting ones included
    num_prefilling: int = 0  # of these, requests without a first token
    num_context_tokens: int = 0  # prompt tokens of all placed requests: what their KV occupies, roughly
    num_cached_blocks: int = 0  # blocks that the index credits to the worker
    slot_wait_s: float = 0.0  # expected wait for a free sequence slot; 0 while slots are free


@dataclass(frozen=True, slots=True)
class Placement:
    """The request to place. `affinity` is a wish, never a rule."""

    num_prompt_tokens: int
    num_blocks: int
    block_size_tokens: int
    affinity: WorkerId | None = None
    caller: bytes = b""  # who asks, for policies that keep a caller's requests together

    def uncached_tokens(self, num_matched_blocks: int) -> int:
        """Tokens to compute on a worker that holds `num_matched_blocks`; at least one: the last is always run."""
        return max(1, self.num_prompt_tokens - num_matched_blocks * self.block_size_tokens)


Matches = Mapping[WorkerId, int]
"""Longest known prefix per worker, in blocks; workers without one are absent."""


class Policy(Protocol):
    """Chooses one of `candidates` (never empty). May keep state of its own, e.g. a turn; never blocks."""

    @property
    def name(self) -> str: ...

    def choose(
        self, placement: Placement, candidates: Sequence[Candidate], matches: Matches, random: Random
    ) -> Candidate: ...


def pick_lowest(costs: Sequence[float], candidates: Sequence[Candidate], random: Random) -> Candidate:
    """The candidate of the lowest cost; ties are broken at random, so that several routers do not herd."""
    lowest = min(costs)
    tied = [index for index, cost in enumerate(costs) if cost <= lowest]
    return candidates[tied[0] if len(tied) == 1 else tied[int(random.random() * len(tied))]]
