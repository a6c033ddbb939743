"""Engines in which prefill and decode share steps, as in continuous batching with chunked prefill.

Runs of equal steps are taken in one go, so the work is a few phases per request and not one per token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from router.simulate.engine import EngineEvent
from router.simulate.step_cost import StepCost

_SMOOTHING = 0.2


@dataclass(slots=True)
class _Prefill:
    request: int
    num_left: int
    num_output: int


@dataclass(slots=True)
class _Phase:
    """`num_steps` equal steps, the first of which starts at the worker's clock."""

    num_steps: int
    step_s: float
    num_prefill_tokens: int  # in each step


@dataclass(slots=True)
class _Engine:
    clock_s: float = 0.0  # end of the last step that was taken
    step: int = 0
    newcomers: deque[_Prefill] = field(default_factory=deque)  # no token computed yet; stays empty unless they go first
    prefills: deque[_Prefill] = field(default_factory=deque)
    decoding: list[tuple[int, int]] = field(default_factory=list)  # heap of (last step, request)
    phase: _Phase | None = None
    version: int = 0
    num_pending_tokens: int = 0
    prefill_rate: float = 0.0
    step_s: float = 0.0


class SharedEngines:
    """First come, first served; at most `max_num_seqs` sequences at once, `token_budget` tokens in a step.

    `newcomers_first`: a prompt's first chunk comes before all that was begun earlier, its rest in order of arrival, as
    Watchword's own scheduler does it. So a short prompt does not wait for a long one.
    """

    def __init__(
        self, num_workers: int, cost: StepCost, token_budget: int, max_num_seqs: int, *, newcomers_first: bool = False
    ) -> None:
        self._cost = cost
        self._token_budget = token_budget
        self._max_num_seqs = max_num_seqs
        self._newcomers_first = newcomers_first
        rate = token_budget / cost.duration_s(token_budget, 0)
        self._engines = [_Engine(prefill_rate=rate, step_s=cost.duration_s(0, 1)) for _ in range(num_workers)]
        self._ends: list[tuple[float, int, int]] = []  # heap of (end of phase, worker, version)

    def submit(self, request: int, worker: int, num_uncached: int, num_output: int, now_s: float) -> None:
        engine = self._engines[worker]
        queue = engine.newcomers if self._newcomers_first else engine.prefills
        queue.append(_Prefill(request, num_uncached, num_output))
        engine.num_pending_tokens += num_uncached
        if engine.phase is None:
            engine.clock_s = now_s
            self._plan(worker)
            return
        # The step under way ends as it began; the newcomer can be part of the next one.
        num_steps = min(engine.phase.num_steps, self._steps_done(engine, now_s) + 1)
        if num_steps < engine.phase.num_steps:
            engine.phase.num_steps = num_steps
            self._schedule(worker)

    def advance(self, until_s: float) -> Iterator[EngineEvent]:
        while self._ends and self._ends[0][0] <= until_s:
            _, worker, version = heapq.heappop(self._ends)
            if version == self._engines[worker].version:
                events = list(self._take(worker))
                self._plan(worker)
                yield from events  # what they make room for can be submitted meanwhile

    def prefill_rate(self, worker: int) -> float:
        return self._engines[worker].prefill_rate

    def decode_step_s(self, worker: int) -> float:
        return self._engines[worker].step_s

    def pending_prefill_tokens(self, worker: int, now_s: float) -> float:
        engine = self._engines[worker]
        if engine.phase is None:
            return engine.num_pending_tokens
        return engine.num_pending_tokens - self._steps_done(engine, now_s) * engine.phase.num_prefill_tokens

    def _steps_done(self, engine: _Engine, now_s: float) -> int:
        assert engine.phase is not None
        return max(0, min(engine.phase.num_steps, math.floor((now_s - engine.clock_s) / engine.phase.step_s)))

    def _plan(self, worker: int) -> None:
        """The longest run of equal steps from here on."""
        engine = self._engines[worker]
        num_decoding = len(engine.decoding)
        budget = max(1, self._token_budget - num_decoding)
        num_slots = self._max_num_seqs - num_decoding
        num_steps, num_tokens = 1_000_000_000, 0
        if engine.newcomers and num_slots > len(engine.prefills):
            num_started = num_slots - len(engine.prefills)
            fitting = sum(each.num_left for each in islice(engine.newcomers, num_started))
            fitting += sum(each.num_left for each in engine.prefills)
            num_steps, num_tokens = 1, min(budget, fitting)
        elif engine.prefills and num_slots > 0:
            head = engine.prefills[0].num_left
            if head > budget:
                num_steps, num_tokens = (head - 1) // budget, budget
            else:
                fitting = sum(engine.prefills[i].num_left for i in range(min(num_slots, len(engine.prefills))))
                num_steps, num_tokens = 1, min(budget, fitting)
        elif not engine.decoding:
            engine.phase = None
            engine.version += 1
            return
        if engine.decoding:
            num_steps = min(num_steps, engine.decoding[0][0] - engine.step)
        engine.phase = _Phase(num_steps, self._cost.duration_s(num_tokens, num_decoding), num_tokens)
        self._schedule(worker)

    def _schedule(self, worker: int) -> None:
        engine = self._engines[worker]
        assert engine.phase is not None
        engine.version += 1
        end_s = engine.clock_s + engine.phase.num_steps * engine.phase.step_s
        heapq.heappush(self._ends, (end_s, worker, engine.version))

    def _take(self, worker: int) -> Iterator[EngineEvent]:
        """Runs the planned phase to its end."""
        engine = self._engines[worker]
        phase = engine.phase
        assert phase is not None
        engine.clock_s += phase.num_steps * phase.step_s
        engine.step += phase.num_steps
        self._measure(engine, phase)
        yield from self._prefill(engine, worker, phase.num_steps * phase.num_prefill_tokens)
        while engine.decoding and engine.decoding[0][0] <= engine.step:
            yield EngineEvent(engine.clock_s, heapq.heappop(engine.decoding)[1], worker, False)

    def _prefill(self, engine: _Engine, worker: int, num_tokens: int) -> Iterator[EngineEvent]:
        engine.num_pending_tokens -= num_tokens
        num_started = self._max_num_seqs - len(engine.decoding) - len(engine.prefills)
        begun: list[_Prefill] = []
        while num_tokens > 0:
            is_new = len(engine.newcomers) > 0 and num_started > 0
            queue = engine.newcomers if is_new else engine.prefills
            head = queue[0]
            taken = min(num_tokens, head.num_left)
            head.num_left -= taken
            num_tokens -= taken
            num_started -= is_new
            if head.num_left == 0:
                queue.popleft()
                yield EngineEvent(engine.clock_s, head.request, worker, True)
                heapq.heappush(engine.decoding, (engine.step + max(0, head.num_output - 1), head.request))
            elif is_new:
                begun.append(queue.popleft())
        engine.prefills.extend(begun)

    def _measure(self, engine: _Engine, phase: _Phase) -> None:
        """What a worker would report: smoothed over steps."""
        weight = 1.0 - (1.0 - _SMOOTHING) ** min(phase.num_steps, 50)
        if phase.num_prefill_tokens:
            engine.prefill_rate += weight * (phase.num_prefill_tokens / phase.step_s - engine.prefill_rate)
        else:
            engine.step_s += weight * (phase.step_s - engine.step_s)
