"""What one router replica believes: its own placements at once, everybody else's only every so often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cluster.api.ids import RequestId, WorkerId
from router.policy import Candidate
from router.simulate.lru_cache import LruCache
from router.simulate.owner_index import OwnerIndex
from router.worker_load import Reservation, WorkerLoad


class CacheChange(NamedTuple):
    """Blocks that a worker stored and evicted when it took a request from router replica `origin`."""

    worker: int
    origin: int
    stored: Sequence[int]
    evicted: Sequence[int]


class LoadBook:
    """The reservations of a set of workers, kept by the router's own `WorkerLoad`."""

    def __init__(
        self, worker_ids: Sequence[WorkerId], max_num_seqs: int, num_blocks: int, rate: float, decode_step_s: float
    ) -> None:
        self.loads = [WorkerLoad(Candidate(w, max_num_seqs, num_blocks, rate, decode_step_s)) for w in worker_ids]
        self.candidates = [load.candidate for load in self.loads]

    def place(self, request_id: RequestId, worker: int, num_uncached: int, num_prompt: int, now_s: float) -> None:
        self.loads[worker].add(Reservation(request_id, self.loads[worker], num_uncached, num_prompt, b"", now_s))

    def first_token(self, request_id: RequestId, worker: int, now_s: float) -> None:
        load = self.loads[worker]
        reservation = load.reservations.get(request_id)
        if reservation is not None:
            reservation.first_token_s = now_s
            load.end_prefill(request_id, now_s)

    def end(self, request_id: RequestId, worker: int, now_s: float) -> None:
        self.loads[worker].remove(request_id, now_s)

    def refresh(self, now_s: float) -> list[Candidate]:
        for load in self.loads:
            if load.candidate.num_running:
                load.refresh(now_s)
        return self.candidates


class ReplicaView:
    """A book and an index of its own, corrected from the truth by `sync`."""

    def __init__(
        self, number: int, book: LoadBook, index: OwnerIndex, guesses: Sequence[LruCache] | None = None
    ) -> None:
        self.number = number
        self.book = book
        self.index = index
        self._guesses = guesses
        self._num_seen_changes = 0

    def sync(
        self,
        now_s: float,
        changes: Sequence[CacheChange],
        pending: Mapping[int, float],
        num_running: Sequence[int],
    ) -> None:
        """`changes` are all so far; `pending` the exact prefill left of workers that have any."""
        for worker, load in enumerate(self.book.loads):
            if num_running[worker] or load.candidate.num_running:
                foreign = num_running[worker] - len(load.reservations)
                load.heal(pending.get(worker, 0.0), load.reservations.keys(), foreign, now_s)
        for change in changes[self._num_seen_changes :]:
            if change.origin != self.number:
                self.apply(change)
        self._num_seen_changes = len(changes)

    def take_own(self, change: CacheChange, block_ids: Sequence[int]) -> None:
        """A request that this replica placed: it knows what is stored, and hears or guesses what is evicted for it."""
        if self._guesses is not None:
            change = CacheChange(change.worker, change.origin, *self._guesses[change.worker].use(block_ids))
        self.apply(change)

    def apply(self, change: CacheChange) -> None:
        self.index.add(change.worker, change.stored)
        self.index.remove(change.worker, change.evicted)
        self.book.candidates[change.worker].num_cached_blocks = self.index.num_blocks_of[change.worker]
