"""The engine: schedule, execute, update. One thread; knows no network, no Ray, no tensor and no text."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable, Set
from itertools import compress

from cache_service.block_key import BlockKeyer
from cache_service.events import BlockEvent
from cluster.api.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    WatchwordError,
)
from cluster.api.ids import BlockKey, RequestId
from cluster.api.output import FinishReason, RequestOutput
from cluster.api.request import Request
from workers.admission import validate_request
from workers.block import BlockWriter
from workers.block_pool import BlockPool
from workers.config import EngineConfig, IsolationCheck
from workers.event_log import BlockEventLog
from workers.isolation_check import IsolationChecker, Violation
from workers.live_request import LiveRequest
from workers.load import EngineLoad, LoadMeter
from workers.output_builder import OutputBuilder
from workers.poison import Poisoner
from workers.publisher import Publisher
from workers.scheduler import Schedule, Scheduler
from workers.sequence import Sequence
from workers.step import ModelRunner, SampledToken, StepInput
from workers.step_builder import StepBuilder
from workers.stop_check import StopCheck

_log = logging.getLogger(__name__)


class LLMEngine:
    """Made by workers/build.py, which injects every collaborator."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        keyer: BlockKeyer,
        pool: BlockPool,
        scheduler: Scheduler,
        step_builder: StepBuilder,
        publisher: Publisher,
        output_builder: OutputBuilder,
        stop_check: StopCheck,
        checker: IsolationChecker,
        poisoner: Poisoner,
        event_log: BlockEventLog,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.runner = runner
        self.pool = pool
        self.scheduler = scheduler
        self.event_log = event_log
        self.violations: list[Violation] = []
        self.quarantine_reason: str | None = None
        self.meter = LoadMeter()
        self.step_id = 0
        self._keyer = keyer
        self._step_builder = step_builder
        self._publisher = publisher
        self._outputs = output_builder
        self._stop_check = stop_check
        self._checker = checker
        self._poisoner = poisoner
        self._clock = clock
        self._live: dict[RequestId, LiveRequest] = {}
        self._deadlines: list[tuple[float, int, RequestId]] = []  # heap; entries of ended requests are skipped
        self._next_expiry_s = 0.0 if config.idle_timeouts_s else math.inf
        self._num_arrivals = 0
        self._num_sequences = 0

    # --- the loop

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns its news. Without anything to compute it only looks at deadlines and aborts."""
        self._begin_step()
        schedule = self.scheduler.schedule()
        step = self._step_builder.build(self.step_id, schedule)
        self._drop_violators(step, schedule)
        if step.rows:
            self._overwrite_stale_memory()
            started = time.perf_counter()
            output = self.runner.execute(step)
            self.meter.note_step(schedule, time.perf_counter() - started)
            self._update(schedule, output.sampled)
        elif self.scheduler.is_stuck:
            self._refuse_first()
        self.scheduler.release_copy_sources(schedule)
        self._zero_purged_blocks()
        if self.config.check_conservation:
            self.pool.check_integrity()
        return self._outputs.take()

    def _begin_step(self) -> None:
        now = self._clock()
        self.step_id += 1
        self.pool.now_s = now
        self.event_log.begin_step(self.step_id, now)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            live = self._live.get(request_id)
            if live is not None and live.arrival == arrival:
                self._fail(live, DeadlineExceededError("the request's deadline has passed"))
        if now >= self._next_expiry_s:
            self.expire_idle_blocks()

    def _update(self, schedule: Schedule, sampled: list[list[SampledToken]]) -> None:
        for seq in schedule.admitted:
            if (live := self._live.get(seq.request.request_id)) is not None:
                live.note_admitted(seq, self.config.block_size)
        for row in schedule.rows:
            self._publisher.note_written(row)
        for row, tokens in zip(schedule.rows, sampled, strict=True):
            assert len(tokens) == (row.seq.num_slots if row.is_sampling else 0)
            if tokens:
                live = self._live[row.seq.request.request_id]
                for seq, token in zip(self._fork(live, row.seq), tokens, strict=True):
                    self._append(live, seq, token)

    def _fork(self, live: LiveRequest, seq: Sequence) -> list[Sequence]:
        """All choices that start from this row, `seq` first; usually it alone."""
        if not seq.unforked_choices:
            return [seq]
        children = [seq.fork(self._next_seq_id(), choice) for choice in seq.unforked_choices]
        seq.unforked_choices = ()
        for child in children:
            for block_id in child.block_table:
                self.pool.share(self.pool.blocks[block_id], child.writer)
            if self.scheduler.window is not None:
                self.scheduler.window.fork(child)
            self.scheduler.add_fork(child)
        live.sequences.extend(children)
        return [seq, *children]

    def _append(self, live: LiveRequest, seq: Sequence, sampled: SampledToken) -> None:
        seq.output_token_ids.append(sampled.token_id)
        reason = self._stop_check.reason(seq)
        if reason is not None:
            self._finish(live, seq, reason)
        stop_token_id = sampled.token_id if reason is FinishReason.STOP else None
        self._outputs.add_token(live, seq, sampled, stop_token_id)

    # --- requests

    def add_request(self, request: Request, *, is_warm_up: bool = False) -> None:
        """Queues a request. Raises InvalidRequestError, OverloadedError or NotFoundError (unknown adapter).

        A warm-up may publish PUBLIC and TEMPLATE blocks, which are then pinned as far as the quotas allow.
        """
        if request.request_id in self._live:
            raise InvalidRequestError("a request with this id is being worked on", param="request_id")
        validate_request(request, self.config, self.runner.vocab_size)
        if len(self.scheduler.waiting) >= self.config.max_queue_len:
            raise OverloadedError(f"{self.config.max_queue_len} requests are waiting", retry_after_s=1.0)
        adapter_digest = self.runner.adapter_digest(request.adapter)
        if request.adapter_digest not in (None, adapter_digest):
            raise UnavailableError("the adapter was replaced while the request was on its way", retry_after_s=1.0)
        account = request.account_hash or request.user_hash
        writer = BlockWriter(request.request_id, account, self.pool.cache.serial, is_warm_up)
        self._num_arrivals += 1
        live = LiveRequest(request, self._num_arrivals, num_choices_left=request.sampling.n)
        for choice, unforked in self._split_choices(request):
            seq = Sequence(self._next_seq_id(), request, self._num_arrivals, writer, adapter_digest, choice, unforked)
            live.sequences.append(seq)
        self._live[request.request_id] = live
        if request.deadline_unix_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_unix_s, self._num_arrivals, request.request_id))
        for seq in live.sequences:
            self._enqueue(live, seq)

    def abort(self, request_id: RequestId) -> None:
        """Ends a request between two steps; unknown ids are ignored, since it may just have finished."""
        live = self._live.get(request_id)
        if live is None:
            return
        for seq in live.unfinished:
            for choice in (seq.choice, *seq.unforked_choices):
                self._outputs.add_finish(live, choice, FinishReason.ABORT)
            self._finish(live, seq, FinishReason.ABORT)

    def abort_all(self) -> None:
        for request_id in tuple(self._live):
            self.abort(request_id)

    def fail_all(self) -> list[RequestOutput]:
        """Ends every request after a crash: nothing of the engine's state may be trusted any more."""
        self._outputs.take()
        for live in self._live.values():
            self._outputs.add_error(live, InternalError("the engine failed"))
        self._live.clear()
        return self._outputs.take()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        return self.scheduler.has_work or self._outputs.has_news

    def _split_choices(self, request: Request) -> list[tuple[int, tuple[int, ...]]]:
        """(choice, choices that fork from it later). One prefill serves all, unless they differ or do not fit."""
        num_choices = request.sampling.n
        if request.emitted or num_choices > self.scheduler.max_num_seqs:
            return [(choice, ()) for choice in range(num_choices)]
        return [(0, tuple(range(1, num_choices)))]

    def _enqueue(self, live: LiveRequest, seq: Sequence) -> None:
        if seq.output_token_ids:  # resumed
            for index in range(len(seq.block_keys), seq.num_tokens // self.config.block_size):
                seq.derive_key(index, self._keyer)
            reason = self._stop_check.reason(seq)
            if reason is not None:
                self._outputs.add_finish(live, seq.choice, reason)
                self._finish(live, seq, reason)
                return
        self.scheduler.add(seq)

    def _finish(self, live: LiveRequest, seq: Sequence, reason: FinishReason) -> None:
        live.num_choices_left -= seq.num_slots
        seq.finish_reason = reason
        self.scheduler.finish(seq)
        self._checker.forget(seq)
        if live.is_finished:
            del self._live[live.request.request_id]
            if seq.adapter_digest is not None:
                self.release_adapters()

    def _fail(self, live: LiveRequest, error: WatchwordError) -> None:
        for seq in live.unfinished:
            self._finish(live, seq, FinishReason.ABORT)
        self._outputs.add_error(live, error)

    def _next_seq_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences

    # --- isolation

    def _drop_violators(self, step: StepInput, schedule: Schedule) -> None:
        """Fails what the structure check objects to, before it runs, and stops all sharing."""
        if self.config.isolation_check is IsolationCheck.OFF:
            return
        found = self._checker.check(step, schedule)
        if not found:
            return
        self.violations.extend(found)
        self.pool.cache.is_sharing = False
        for violation in found:
            _log.error("isolation check: %s in step %d, block %s", violation.kind, step.step_id, violation.block_id)
        self._abandon({violation.request_id for violation in found}, step, schedule)

    def _abandon(self, request_ids: set[RequestId | None], step: StepInput, schedule: Schedule) -> None:
        """Takes the requests out without giving their blocks back: whose they are is no longer known."""
        keep = [row.seq.request.request_id not in request_ids for row in schedule.rows]
        step.rows = list(compress(step.rows, keep))
        schedule.rows = list(compress(schedule.rows, keep))
        keep = [seq.request.request_id not in request_ids for seq in schedule.copy_holders]
        schedule.block_copies[:] = compress(schedule.block_copies, keep)
        schedule.page_copies[:] = compress(schedule.page_copies, keep)
        schedule.copy_holders[:] = compress(schedule.copy_holders, keep)
        step.block_copies, step.page_copies = schedule.block_copies, schedule.page_copies
        for request_id in request_ids:
            live = self._live.get(request_id) if request_id is not None else None
            if live is not None:
                for seq in live.unfinished:
                    seq.forget_blocks()
                self._fail(live, InternalError("the request was stopped by an isolation check"))

    def _refuse_first(self) -> None:
        """The first in the queue can never start: blocks were lost to a violation. Everything else is a bug."""
        assert not self.is_healthy, "an admissible request does not fit into an empty pool"
        live = self._live[self.scheduler.waiting[0].request.request_id]
        self._fail(live, UnavailableError("the worker has lost KV blocks and is being replaced"))

    def _overwrite_stale_memory(self) -> None:
        if self.config.isolation_check is IsolationCheck.POISON:
            self._poisoner.apply()
        self._zero_purged_blocks()

    def _zero_purged_blocks(self) -> None:
        block_ids = self.pool.drain_zeroing()
        if block_ids:
            self.runner.fill_blocks(block_ids, 0.0)

    @property
    def is_healthy(self) -> bool:
        """False after a violation, a damaged block or a quarantine: to be drained, its event log kept."""
        return not self.violations and not self.pool.cache.counters.checksum_failures and self.quarantine_reason is None

    def quarantine(self, reason: str) -> bool:
        """Ends all sharing and everything that runs, on evidence from outside. False: it was quarantined before.

        What has no output yet may be tried elsewhere. What has some is failed for good: another worker would go on from
        tokens that may be another user's.
        """
        if self.quarantine_reason is not None:
            return False
        self.quarantine_reason = reason
        self.pool.cache.is_sharing = False
        _log.error("quarantined: %s", reason)
        for live in tuple(self._live.values()):
            if live.has_output:
                self._fail(live, InternalError("the request was stopped by an isolation check"))
            else:
                self._fail(live, UnavailableError("the worker is quarantined"))
        return True

    def set_max_num_seqs(self, max_num_seqs: int) -> None:
        """From the next step on so many sequences run together; those above it that run already go on.

        Raises ValueError outside 1 … config.max_num_seqs, which the runner was tested for.
        """
        if not 1 <= max_num_seqs <= self.config.max_num_seqs:
            raise ValueError(f"max_num_seqs is {max_num_seqs}, must be from 1 to {self.config.max_num_seqs}")
        self.scheduler.max_num_seqs = max_num_seqs

    def release_adapters(self) -> None:
        """Unloaded and replaced adapters go when the last request with them has ended."""
        sequences = (live.sequences[0] for live in self._live.values())
        self.runner.release_adapters({seq.adapter_digest for seq in sequences if seq.adapter_digest is not None})

    # --- the prefix cache from outside

    def cached_keys(self) -> tuple[BlockKey, ...]:
        """Every key that can be found here: the snapshot that replaces what the index believes."""
        return self.pool.cache.keys()

    def drain_events(self) -> list[BlockEvent]:
        """What was published and removed since the last call. They gather until somebody calls."""
        return self.pool.cache.drain_events()

    def purge_user(self, user_hash: bytes) -> int:
        """Removes and zeroes a user's blocks; running requests go on but publish nothing more. Returns how many."""
        serials = (live.sequences[0].writer.serial for live in self._live.values())
        num_removed = self.pool.purge(user_hash, oldest_live_serial=min(serials, default=self.pool.cache.serial))
        self._zero_purged_blocks()
        return num_removed

    def expire_idle_blocks(self) -> int:
        """Drops private blocks unused for their scope's time. Steps call it often enough for no hit to come much later;
        a worker may call it too, so that an idle engine forgets in time. Returns how many blocks went."""
        timeouts_s = self.config.idle_timeouts_s
        if not timeouts_s:
            return 0
        now = self._clock()
        self._next_expiry_s = now + min(timeouts_s.values()) / 16
        return self.pool.expire({scope: now - timeout_s for scope, timeout_s in timeouts_s.items()})

    def num_pinned_blocks(self, keys: tuple[BlockKey, ...]) -> int:
        """How many leading blocks of a warmed chain are held here for good; fewer than asked = over a quota."""
        return self.pool.count_pinned(keys)

    def keep_pins(self, keys: Set[BlockKey]) -> int:
        """Lets the blocks of all templates but these be evicted. Returns how many were pinned."""
        return self.pool.keep_pins(keys)

    def load(self) -> EngineLoad:
        """What the worker's snapshot tells the router."""
        sequences = [*self.scheduler.running, *self.scheduler.waiting]
        return EngineLoad(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            pending_prefill_tokens=sum(seq.num_new_tokens for seq in sequences if seq.num_new_tokens > 1),
            num_free_blocks=self.pool.num_available,
            prefill_tokens_per_s=self.meter.prefill_tokens_per_s,
            decode_step_s=self.meter.decode_step_s,
            request_ids=tuple(self._live),
            is_healthy=self.is_healthy,
        )
