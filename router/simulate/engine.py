"""What a simulated engine offers, and the simplest one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple, Protocol


class EngineEvent(NamedTuple):
    """`is_first_token` or, when not, the end of the request."""

    time_s: float
    request: int
    worker: int
    is_first_token: bool


class SimulatedEngines(Protocol):
    """All workers' engines together. Requests are numbers; times never go back."""

    def submit(self, request: int, worker: int, num_uncached: int, num_output: int, now_s: float) -> None: ...

    def advance(self, until_s: float) -> Iterator[EngineEvent]:
        """Events up to and including `until_s`, in order."""
        ...

    def prefill_rate(self, worker: int) -> float:
        """Tokens per second as the engine measures it."""
        ...

    def decode_step_s(self, worker: int) -> float:
        """Duration of a decode step as the engine measures it."""
        ...

    def pending_prefill_tokens(self, worker: int, now_s: float) -> float:
        """Left to compute, exactly; `advance(now_s)` must have been called."""
        ...


class SerialEngines:
    """Prefill first come, first served, one at a time at a fixed rate; decoding takes its time but no capacity."""

    def __init__(self, num_workers: int, prefill_tokens_per_s: float, decode_token_s: float) -> None:
        self._rate = prefill_tokens_per_s
        self._decode_token_s = decode_token_s
        self._free_at_s = [0.0] * num_workers
        self._events: list[EngineEvent] = []

    def submit(self, request: int, worker: int, num_uncached: int, num_output: int, now_s: float) -> None:
        first_token_s = max(now_s, self._free_at_s[worker]) + num_uncached / self._rate
        self._free_at_s[worker] = first_token_s
        heapq.heappush(self._events, EngineEvent(first_token_s, request, worker, True))
        end_s = first_token_s + num_output * self._decode_token_s
        heapq.heappush(self._events, EngineEvent(end_s, request, worker, False))

    def advance(self, until_s: float) -> Iterator[EngineEvent]:
        while self._events and self._events[0].time_s <= until_s:
            yield heapq.heappop(self._events)

    def prefill_rate(self, worker: int) -> float:
        return self._rate

    def decode_step_s(self, worker: int) -> float:
        return self._decode_token_s

    def pending_prefill_tokens(self, worker: int, now_s: float) -> float:
        return max(0.0, self._free_at_s[worker] - now_s) * self._rate
