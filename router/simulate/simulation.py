"""One policy, one trace, one simulated cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from cluster.api.ids import RequestId, WorkerId
from router.policies.scored import OraclePolicy
from router.policy import Placement, Policy
from router.simulate.config import EngineKind, SimulationConfig
from router.simulate.engine import EngineEvent, SerialEngines, SimulatedEngines
from router.simulate.front_queue import FrontQueue, Turn
from router.simulate.lru_cache import LruCache
from router.simulate.owner_index import OwnerIndex
from router.simulate.result import PolicyResult, summarize
from router.simulate.shared_engine import SharedEngines
from router.simulate.trace import TraceRequest
from router.simulate.view import CacheChange, LoadBook, ReplicaView

Progress = Callable[[int], None]
"""Called with the number of requests done since the last call."""
PROGRESS_STEP = 256
_UNLIMITED_SEQS = 1_000_000


def make_engines(config: SimulationConfig) -> SimulatedEngines:
    if config.engine is EngineKind.SERIAL:
        return SerialEngines(config.num_workers, config.prefill_tokens_per_s, config.decode_token_s)
    cost = config.step_cost.at_rate(config.prefill_tokens_per_s, config.token_budget)
    return SharedEngines(
        config.num_workers, cost, config.token_budget, config.max_num_seqs, newcomers_first=config.newcomers_first
    )


class Simulation:
    """Requests are placed when they arrive, or when admission gives them their turn; a worker's cache holds a prompt's
    blocks from then on, because what comes later on that worker also runs later."""

    def __init__(self, config: SimulationConfig, policy: Policy) -> None:
        self._config = config
        self._policy = policy
        self._random = Random(config.seed)
        self._worker_ids = [WorkerId(f"w{number}") for number in range(config.num_workers)]
        self._numbers = {worker_id: number for number, worker_id in enumerate(self._worker_ids)}
        self._caches = [LruCache(config.cache_blocks) for _ in range(config.num_workers)]
        self._engines = make_engines(config)
        self._truth = ReplicaView(-1, self._new_book(), OwnerIndex(self._worker_ids))
        self._replicas = self._make_replicas()
        self._lag_s = config.lag_s if config.engine is EngineKind.SERIAL else max(config.lag_s, config.report_period_s)
        self._next_sync_s = 0.0 if self._replicas[0] is not self._truth and self._lag_s < math.inf else math.inf
        self._changes: list[CacheChange] = []
        self._worker_of: dict[int, tuple[int, ReplicaView]] = {}
        self._queue: FrontQueue | None = None
        if config.admission is not None:
            self._queue = FrontQueue(config.admission, config.num_workers, config.max_num_seqs, self._place)
        self._requests: Sequence[TraceRequest] = ()
        self._request_ids: list[RequestId] = []
        self.first_token_s: list[float] = []
        self.placed = [0] * config.num_workers
        self.num_hit_blocks = 0
        self._num_blocks = 0  # of the prompts that were placed

    def run(self, requests: Sequence[TraceRequest], progress: Progress | None = None) -> PolicyResult:
        self._requests = requests
        self._request_ids = [RequestId(str(number)) for number in range(len(requests))]
        self.first_token_s = [math.nan] * len(requests)
        for number, request in enumerate(requests):
            self._sync_until(request.arrival_s)
            self._advance(request.arrival_s)
            if self._queue is None:
                self._place(Turn(number, request, request.arrival_s, _UNLIMITED_SEQS))
            else:
                self._queue.arrive(number, request, request.arrival_s)
            if progress is not None and number % PROGRESS_STEP == PROGRESS_STEP - 1:
                progress(PROGRESS_STEP)
        self._advance(float("inf"))
        if progress is not None:
            progress(len(requests) % PROGRESS_STEP)
        ttft_s = [at_s - request.arrival_s for at_s, request in zip(self.first_token_s, requests, strict=True)]
        return summarize(ttft_s, [r.tenant for r in requests], self.num_hit_blocks, self._num_blocks, self.placed)

    def _new_book(self) -> LoadBook:
        config = self._config
        max_num_seqs = _UNLIMITED_SEQS if config.engine is EngineKind.SERIAL else config.max_num_seqs
        return LoadBook(
            self._worker_ids,
            max_num_seqs,
            config.cache_blocks,
            self._engines.prefill_rate(0),
            self._engines.decode_step_s(0),
        )

    def _make_replicas(self) -> list[ReplicaView]:
        config = self._config
        has_exact_state = config.num_routers == 1 and config.engine is EngineKind.SERIAL
        if has_exact_state or isinstance(self._policy, OraclePolicy):
            return [self._truth]
        return [
            ReplicaView(number, self._new_book(), OwnerIndex(self._worker_ids), self._guesses())
            for number in range(config.num_routers)
        ]

    def _guesses(self) -> list[LruCache] | None:
        """A replica that hears of no eviction can only guess them, from its own requests."""
        config = self._config
        is_told = config.lag_s < math.inf
        return None if is_told else [LruCache(config.cache_blocks) for _ in range(config.num_workers)]

    def _place(self, turn: Turn) -> bool:
        """False when no worker has room."""
        request, now_s = turn.request, turn.now_s
        view = self._replicas[turn.number % len(self._replicas)]
        if view is self._truth and self._config.engine is EngineKind.SHARED:
            self._sync(now_s)  # exact state: as of this moment
        candidates = view.book.refresh(now_s)
        if turn.most_seqs < _UNLIMITED_SEQS:
            candidates = [each for each in candidates if each.num_running < turn.most_seqs]
            if not candidates:
                return False
        placement = Placement(request.num_prompt_tokens, len(request.block_ids), self._config.block_size_tokens)
        believed = view.index.match(request.block_ids)
        chosen = self._policy.choose(placement, candidates, believed, self._random)
        num_hit = believed.get(chosen.worker_id, 0)
        if view is not self._truth:
            num_hit = self._truth.index.match(request.block_ids).get(chosen.worker_id, 0)
        self._take(turn, self._numbers[chosen.worker_id], num_hit, placement, view)
        return True

    def _take(self, turn: Turn, worker: int, num_hit: int, placement: Placement, view: ReplicaView) -> None:
        number, request, now_s, _ = turn
        num_uncached = placement.uncached_tokens(num_hit)
        stored, evicted = self._caches[worker].use(request.block_ids)
        change = CacheChange(worker, view.number, stored, evicted)
        self._truth.apply(change)
        self._truth.book.place(self._request_ids[number], worker, num_uncached, request.num_prompt_tokens, now_s)
        if view is not self._truth:
            view.take_own(change, request.block_ids)
            view.book.place(self._request_ids[number], worker, num_uncached, request.num_prompt_tokens, now_s)
            self._changes.append(change)
        self._worker_of[number] = (worker, view)
        self._engines.submit(number, worker, num_uncached, request.num_output_tokens, now_s)
        self.placed[worker] += 1
        self.num_hit_blocks += num_hit
        self._num_blocks += len(request.block_ids)

    def _advance(self, until_s: float) -> None:
        for event in self._engines.advance(until_s):
            self._apply(event)

    def _apply(self, event: EngineEvent) -> None:
        worker, view = self._worker_of[event.request]
        request_id = self._request_ids[event.request]
        books = (self._truth.book,) if view is self._truth else (self._truth.book, view.book)
        if event.is_first_token:
            self.first_token_s[event.request] = event.time_s
            for book in books:
                book.first_token(request_id, worker, event.time_s)
        else:
            del self._worker_of[event.request]
            for book in books:
                book.end(request_id, worker, event.time_s)
            if self._queue is not None:
                self._queue.end(self._requests[event.request], event.time_s)

    def _sync_until(self, until_s: float) -> None:
        """All replicas learn at the same moments, `lag_s` apart. That is the worst case: they err in the same way."""
        if self._lag_s == 0.0 and self._next_sync_s < math.inf:
            self._advance(until_s)
            self._sync(until_s)
            return
        while self._next_sync_s <= until_s:
            self._advance(self._next_sync_s)
            self._sync(self._next_sync_s)
            self._next_sync_s += self._lag_s

    def _sync(self, now_s: float) -> None:
        num_running = [candidate.num_running for candidate in self._truth.book.candidates]
        pending = {
            worker: self._engines.pending_prefill_tokens(worker, now_s)
            for worker, count in enumerate(num_running)
            if count
        }
        for view in self._replicas:
            for worker in pending:
                candidate = view.book.candidates[worker]
                candidate.prefill_tokens_per_s = self._engines.prefill_rate(worker)
                candidate.decode_step_s = self._engines.decode_step_s(worker)
            view.sync(now_s, self._changes, pending, num_running)
