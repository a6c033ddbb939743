"""One request of a trace, and what is done to whole traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`block_ids` name the blocks of the prompt, the last one perhaps partial; equal ids mean equal prefixes."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]
    tenant: int = 0
    session: int | None = None


def scale_load(requests: Sequence[TraceRequest], load: float) -> list[TraceRequest]:
    """The same requests `load` times as fast."""
    if not load > 0:
        raise ValueError(f"load is {load}, allowed are values above 0")
    if load == 1.0:
        return list(requests)
    return [replace(request, arrival_s=request.arrival_s / load) for request in requests]


SPREAD_SEED = 7
"""Arrivals within a bucket are part of the input, the same for every policy and every seed of a run."""


def spread_buckets(requests: Sequence[TraceRequest], seed: int = SPREAD_SEED) -> list[TraceRequest]:
    """Undoes the rounding of arrival times: each request comes at a random moment of its bucket.

    Mooncake's times are multiples of 3 s; taken as they are, ten requests would arrive at once. The bucket is the
    smallest distance between two different times; a trace in which no two requests share a time is left alone.
    """
    times = sorted({request.arrival_s for request in requests})
    if len(times) == len(requests) or len(times) < 2:
        return list(requests)
    bucket_s = min(later - earlier for earlier, later in pairwise(times))
    random = Random(seed)
    spread = [replace(request, arrival_s=request.arrival_s + random.random() * bucket_s) for request in requests]
    return sorted(spread, key=lambda request: request.arrival_s)
