"""The router: takes a query, waits its turn, chooses a worker and holds a place there. Decides only; carries no tokens.

A plain class for one event loop; actor shells wrap it. Every state change is synchronous, so nothing can come between
choosing and reserving; `route` awaits only its turn in the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Protocol

from cluster.api.errors import (
    DeadlineExceededError,
    OverloadedError,
    RateLimitedError,
    UnavailableError,
)
from cluster.api.ids import BlockKey, RequestId, WorkerId
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.worker_state import WorkerInfo, WorkerSnapshot
from router.admission import MIN_RETRY_AFTER_S, Admission, Waiting
from router.affinity import Affinity
from router.circuit import FailureKind
from router.config import RouterConfig, TenantLimits
from router.fair_queue import Entry
from router.policies.watchword import WatchwordPolicy
from router.policy import Placement, Policy
from router.registry import Registry, WorkerRecord
from router.reservations import Reservations
from router.stats import Counters, RouterStats, WorkerStats
from router.worker_load import Reservation


class RoutingIndex(Protocol):
    """The part of a prefix index that the router needs; answers from memory."""

    def match(self, keys: Sequence[BlockKey]) -> Mapping[WorkerId, int]:
        """Longest held prefix of `keys` per worker, in blocks; workers without one are absent."""
        ...

    def speculate(self, worker_id: WorkerId, keys: Sequence[BlockKey], ttl_s: float) -> None:
        """Counts `keys` as held for `ttl_s`: a burst with one new prefix stays together before its events come."""
        ...

    def expect_epoch(self, worker_id: WorkerId, epoch: str) -> None:
        """The worker's current life; blocks of another one are forgotten."""
        ...

    def drop_worker(self, worker_id: WorkerId) -> None:
        """The worker is gone; so are its blocks."""
        ...


def make_policy(config: RouterConfig) -> Policy:
    return WatchwordPolicy(
        congestion_per_s=config.congestion_per_s,
        decode_weight=config.decode_weight,
        affinity_slack_s=config.affinity_slack_s,
    )


class Router:
    """`clock` is monotonic seconds, `unix_clock` is for deadlines, which cross machines."""

    def __init__(
        self,
        index: RoutingIndex,
        config: RouterConfig | None = None,
        *,
        policy: Policy | None = None,
        tenant_limits: Mapping[bytes, TenantLimits] | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        random: Random | None = None,
    ) -> None:
        self.config = config or RouterConfig()
        self.index = index
        self._policy = policy or make_policy(self.config)
        self._clock = clock
        self._unix_clock = unix_clock
        self._random = random or Random()
        self.registry = Registry(self.config)
        self.reservations = Reservations(self.config.reservation_grace_s)
        self.admission = Admission(self.config.admission, tenant_limits)
        self._affinity = Affinity(self.config.affinity_ttl_s, self.config.max_affinity_keys)
        self._futures: dict[Waiting, asyncio.Future[RouteDecision]] = {}
        self.counters = Counters()

    # -- the request path ------------------------------------------------------------------------------------------

    async def route(self, query: RouteQuery) -> RouteDecision:
        """Chooses a worker and reserves a place on it, held until `release(query.request_id)`.

        The same request asked twice gets the same place, unless that worker is among `excluded` or gone. A query with
        `excluded` or `numerics` is a retry: it is not charged again and waits ahead of fresh ones.
        Cancelling it while it waits leaves no place behind.
        Raises RateLimitedError, OverloadedError, DeadlineExceededError or UnavailableError.
        """
        now_s = self._clock()
        if (held := self._held_place(query, now_s)) is not None:
            return held
        is_retry = bool(query.excluded) or query.numerics is not None
        give_up_s = self._give_up_s(query, now_s)
        if is_retry:
            self.counters.num_retries += 1
            self.release(query.request_id)
        else:
            self._admit(query, give_up_s, now_s)
        waiting = Waiting(query, give_up_s)
        entry = self.admission.enqueue(waiting, is_retry=is_retry, now_s=now_s)
        # Straight through when this entry's turn is now: no future, no trip through the event loop.
        placed = self._serve_queue(now_s, watched=entry)
        if placed is not None:
            return placed
        self._shed_if_full(entry)
        return await self._wait(entry, now_s)

    def first_token(self, request_id: RequestId, worker_id: WorkerId | None = None) -> None:
        """The prefill is done: its part of the place is free. Harmless when told twice or too late."""
        if not self._is_placed_on(request_id, worker_id):
            return
        reservation = self.reservations.first_token(request_id, self._clock())
        if reservation is not None:
            record = self.registry.get(reservation.load.candidate.worker_id)
            if record is not None and record.load is reservation.load:
                record.circuit.record_success()

    def release(self, request_id: RequestId, worker_id: WorkerId | None = None) -> None:
        """The request has ended, however. Call it in a `finally`; harmless when told twice.

        With `worker_id` only a place on that worker is given back: the word of an attempt that was lost can come after
        the request was placed anew.
        """
        now_s = self._clock()
        if self._is_placed_on(request_id, worker_id) and self.reservations.release(request_id, now_s) is not None:
            self._serve_queue(now_s)

    # -- what workers and gateways tell ----------------------------------------------------------------------------

    def register(self, info: WorkerInfo) -> None:
        """A worker has started (or says again that it lives). A new epoch ends everything known of the old one."""
        now_s = self._clock()
        replaced = self.registry.register(info, now_s)
        if replaced is not None:
            self._end_of_life(replaced, now_s)
        self.index.expect_epoch(info.worker_id, info.epoch)
        self._serve_queue(now_s)

    def report(self, snapshot: WorkerSnapshot) -> bool:
        """Heartbeat and load. False: this router does not know that epoch, the worker should `register` first."""
        now_s = self._clock()
        record = self.registry.report(snapshot, now_s)
        if record is not None:
            self.counters.num_healed += self.reservations.heal(record.load, snapshot, now_s)
        for silent in self.registry.remove_silent(now_s):
            self._end_of_life(silent, now_s)
            self.index.drop_worker(silent.info.worker_id)
        self._serve_queue(now_s)
        return record is not None

    def worker_failed(self, worker_id: WorkerId, epoch: str, kind: FailureKind | str) -> None:
        """A gateway could not use the worker. Its own requests' places stay until they are released or routed anew."""
        now_s = self._clock()
        kind = FailureKind(kind)
        record = self.registry.record_failure(worker_id, epoch, kind, now_s)
        if record is not None and kind is FailureKind.DIED:
            self._end_of_life(record, now_s)
        self._serve_queue(now_s)

    def forget(self, worker_id: WorkerId) -> None:
        """The worker is no member any more."""
        now_s = self._clock()
        record = self.registry.remove(worker_id)
        if record is not None:
            self._end_of_life(record, now_s)
            self.index.drop_worker(worker_id)

    def members(self) -> list[tuple[WorkerInfo, bool]]:
        """Every registered worker, and whether it takes work now."""
        now_s = self._clock()
        return [(record.info, self.registry.is_live(record, now_s)) for record in self.registry.records()]

    def set_tenant_limits(self, tenant_hash: bytes, limits: TenantLimits) -> None:
        self.admission.set_limits(tenant_hash, limits)

    def stats(self) -> RouterStats:
        now_s = self._clock()
        return RouterStats(
            counters=replace(self.counters),
            num_queued=len(self.admission.queue),
            num_reservations=len(self.reservations),
            workers=tuple(self._worker_stats(record, now_s) for record in self.registry.records()),
        )

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _admit(self, query: RouteQuery, give_up_s: float, now_s: float) -> None:
        try:
            self.admission.check_rate(query, now_s)
        except RateLimitedError:
            self.counters.num_rate_limited += 1
            raise
        try:
            self.admission.check_deadline(query, give_up_s, now_s)
        except OverloadedError:
            self.counters.num_overloaded += 1
            self.admission.refund(query)
            raise

    def _give_up_s(self, query: RouteQuery, now_s: float) -> float:
        give_up_s = now_s + self.config.admission.max_queue_wait_s
        if query.deadline_unix_s is None:
            return give_up_s
        left_s = query.deadline_unix_s - self._unix_clock()
        if left_s <= 0:
            self.counters.num_expired += 1
            raise DeadlineExceededError("the request's deadline passed before it was routed")
        return min(give_up_s, now_s + left_s)

    def _shed_if_full(self, entry: Entry[Waiting]) -> None:
        victim = self.admission.make_room()
        if victim is None:
            return
        assert victim.on_shed is not None
        self.counters.num_overloaded += 1
        self.admission.refund(victim.query)
        if victim is entry.item:
            raise victim.on_shed
        future = self._futures.pop(victim)
        if not future.done():
            future.set_exception(victim.on_shed)

    async def _wait(self, entry: Entry[Waiting], now_s: float) -> RouteDecision:
        waiting = entry.item
        future = self._futures[waiting] = asyncio.get_running_loop().create_future()
        is_delivered = False
        try:
            if not self.registry.eligible(waiting.query, now_s):
                await self._wait_for_worker(future, waiting, now_s)
            await asyncio.wait([future], timeout=max(0.0, waiting.give_up_s - self._clock()))
            if not future.done():
                raise self._expired(waiting)
            decision = future.result()
            is_delivered = True
            return decision
        except asyncio.CancelledError:
            self.counters.num_aborted_waiting += 1
            raise
        finally:
            self._futures.pop(waiting, None)
            self.admission.queue.remove(entry)
            if not future.done():
                future.cancel()
            elif not is_delivered and future.exception() is None:
                # Placed in the same moment in which the caller went away: nobody else would give the place back.
                self.release(waiting.query.request_id)

    async def _wait_for_worker(self, future: asyncio.Future[RouteDecision], waiting: Waiting, now_s: float) -> None:
        """While no worker is live, a request waits less long than in a mere queue."""
        timeout_s = min(self.config.admission.worker_wait_s, waiting.give_up_s - now_s)
        await asyncio.wait([future], timeout=timeout_s)
        if not future.done() and not self.registry.eligible(waiting.query, self._clock()):
            self.counters.num_unavailable += 1
            raise UnavailableError("no live worker can serve this request", retry_after_s=MIN_RETRY_AFTER_S)

    def _expired(self, waiting: Waiting) -> DeadlineExceededError | OverloadedError:
        self.counters.num_expired += 1
        deadline_unix_s = waiting.query.deadline_unix_s
        if deadline_unix_s is not None and deadline_unix_s <= self._unix_clock():
            return DeadlineExceededError("the request's deadline passed while it waited for a worker")
        return OverloadedError(
            f"no worker became free within {self.config.admission.max_queue_wait_s} s",
            retry_after_s=MIN_RETRY_AFTER_S,
        )

    def _serve_queue(self, now_s: float, watched: Entry[Waiting] | None = None) -> RouteDecision | None:
        """Places waiting requests while there is room, fairest first. Returns the decision for `watched`, if made."""
        result: RouteDecision | None = None
        for entry, decision in self.admission.serve(lambda query: self._place(query, now_s), now_s):
            if entry is watched:
                result = decision
            else:
                self._futures.pop(entry.item).set_result(decision)
        return result

    # -- choosing --------------------------------------------------------------------------------------------------

    def _place(self, query: RouteQuery, now_s: float) -> RouteDecision | None:
        """Chooses and reserves in one go; None while no eligible worker has room."""
        if (held := self._held_place(query, now_s)) is not None:
            return held  # the same request was queued twice
        records = self._with_room(query, now_s)
        if not records:
            return None
        candidates = [record.load.refresh(now_s) for record in records.values()]
        matches = self.index.match(query.block_keys) if query.block_keys else {}
        first = next(iter(records.values()))
        placement = Placement(
            num_prompt_tokens=query.num_prompt_tokens,
            num_blocks=len(query.block_keys),
            block_size_tokens=first.info.block_size_tokens,
            affinity=self._affinity.worker_of(query.tenant_hash, query.affinity_key, now_s),
            caller=query.tenant_hash + query.user_hash + (query.affinity_key or "").encode(),
        )
        chosen = self._policy.choose(placement, candidates, matches, self._random)
        record = records[chosen.worker_id]
        num_matched = matches.get(chosen.worker_id, 0)
        self._reserve(query, record, num_matched, placement.uncached_tokens(num_matched), now_s)
        return self._decision(record, num_matched)

    def _with_room(self, query: RouteQuery, now_s: float) -> dict[WorkerId, WorkerRecord]:
        records = self.registry.eligible(query, now_s)
        num_places = sum(record.info.max_num_seqs for record in records)
        spare = self.admission.spare_seqs(self.reservations.num_running_of(query.tenant_hash), num_places, now_s)
        with_room = {}
        for record in records:
            limit = max(1, record.info.max_num_seqs + spare)
            if record.load.candidate.num_running < limit and record.circuit.can_take_work(now_s):
                with_room[record.info.worker_id] = record
        return with_room

    def _reserve(
        self, query: RouteQuery, record: WorkerRecord, num_matched: int, uncached_tokens: int, now_s: float
    ) -> None:
        reservation = Reservation(
            request_id=query.request_id,
            load=record.load,
            prefill_tokens=uncached_tokens,
            context_tokens=query.num_prompt_tokens,
            tenant_hash=query.tenant_hash,
            created_s=now_s,
            num_matched_blocks=num_matched,
        )
        self.reservations.reserve(reservation)
        worker_id = record.info.worker_id
        if num_matched < len(query.block_keys):
            self.index.speculate(worker_id, query.block_keys[num_matched:], self.config.speculation_ttl_s)
        self._affinity.remember(query.tenant_hash, query.affinity_key, worker_id, now_s)
        record.circuit.start_trial(now_s)
        self.counters.num_decisions += 1
        self.counters.num_prompt_blocks += len(query.block_keys)
        self.counters.num_matched_blocks += num_matched

    def _held_place(self, query: RouteQuery, now_s: float) -> RouteDecision | None:
        reservation = self.reservations.get(query.request_id)
        if reservation is None or reservation.load.candidate.worker_id in query.excluded:
            return None
        record = self.registry.get(reservation.load.candidate.worker_id)
        if record is None or record.load is not reservation.load or not self.registry.is_live(record, now_s):
            return None
        return self._decision(record, reservation.num_matched_blocks)

    def _is_placed_on(self, request_id: RequestId, worker_id: WorkerId | None) -> bool:
        reservation = self.reservations.get(request_id)
        return reservation is not None and worker_id in (None, reservation.load.candidate.worker_id)

    def _decision(self, record: WorkerRecord, num_matched: int) -> RouteDecision:
        info = record.info
        return RouteDecision(info.worker_id, info.epoch, info.replica_id, info.numerics, num_matched)

    def _end_of_life(self, record: WorkerRecord, now_s: float) -> None:
        self.counters.num_lost_with_worker += self.reservations.release_all(record.load, now_s)

    def _worker_stats(self, record: WorkerRecord, now_s: float) -> WorkerStats:
        candidate = record.load.refresh(now_s)
        return WorkerStats(
            worker_id=record.info.worker_id,
            epoch=record.info.epoch,
            is_live=self.registry.is_live(record, now_s),
            is_draining=record.is_draining,
            is_circuit_open=record.circuit.is_open,
            num_running=candidate.num_running,
            num_prefilling=candidate.num_prefilling,
            pending_prefill_tokens=candidate.pending_prefill_tokens,
            prefill_tokens_per_s=candidate.prefill_tokens_per_s,
            last_seen_age_s=now_s - record.last_seen_s,
            snapshot=record.snapshot,
            is_heard=self.registry.is_heard(record, now_s),
        )
