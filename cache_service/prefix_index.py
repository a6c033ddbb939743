"""Which worker holds which prefix, as far as events tell. Answers are hints: the worker verifies every hit.

The only truth about a worker is (epoch, sequence number). A batch of a new epoch starts from nothing; one of a replaced
epoch is dropped; a missing one marks the worker in `needs_snapshot` until a snapshot that covers the gap arrives.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cache_service.events import EventBatch, Snapshot
from cache_service.fingerprint_table import FingerprintTable
from cache_service.fingerprints import Fingerprints, fingerprints, net_effect
from cache_service.owner_sets import OwnerSets
from cache_service.speculation import Speculation
from cluster.api.ids import BlockKey, WorkerId

MAX_PENDING_BATCHES = 1024
MAX_DEAD_EPOCHS = 16
MAX_DEAD_WORKERS = 1024
MATCH_CHUNK = 256
APPLY_CHUNK = 8192


@dataclass(slots=True)
class IndexCounters:
    """Counts since the start."""

    batches: int = 0
    duplicate_batches: int = 0
    dead_epoch_batches: int = 0
    gaps: int = 0
    snapshots: int = 0
    stale_snapshots: int = 0
    dropped_workers: int = 0


class PrefixIndex(Protocol):
    @property
    def needs_snapshot(self) -> frozenset[WorkerId]:
        """Workers of which a batch is missing."""
        ...

    @property
    def counters(self) -> IndexCounters: ...

    def apply(self, batch: EventBatch) -> None: ...

    def apply_snapshot(self, snapshot: Snapshot) -> None: ...

    def drop_worker(self, worker_id: WorkerId) -> None:
        """The worker is dead: forgets its blocks and refuses late events of its epoch."""
        ...

    def match(self, keys: Sequence[BlockKey]) -> dict[WorkerId, int]:
        """Leading blocks of `keys` that each worker holds; workers with none are left out."""
        ...

    def keys(self, worker_id: WorkerId) -> frozenset[bytes]:
        """Fingerprints of what a worker holds. Scans everything: for tests and audits."""
        ...


@dataclass(slots=True)
class _Worker:
    """What is believed of one life of a worker. `bit` is its place in the owner masks, 0 while it owns nothing."""

    bit: int = 0
    epoch: str | None = None
    sequence: int = 0
    has_gap: bool = False
    pending: deque[EventBatch] = field(default_factory=lambda: deque(maxlen=MAX_PENDING_BATCHES))  # seen after the gap
    dead_epochs: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_DEAD_EPOCHS))


class InMemoryPrefixIndex:
    """Not thread-safe: belongs to one event loop or thread. `expected_blocks` spares the growing."""

    def __init__(self, expected_blocks: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = IndexCounters()
        self._sets = OwnerSets()
        self._table = FingerprintTable(self._sets.keep_owned, expected_blocks)
        self._speculation = Speculation(clock)
        self._workers: dict[WorkerId, _Worker] = {}
        self._by_bit: dict[int, WorkerId] = {}
        self._free_bits: list[int] = []

    @property
    def needs_snapshot(self) -> frozenset[WorkerId]:
        return frozenset(worker_id for worker_id, worker in self._workers.items() if worker.has_gap)

    @property
    def workers(self) -> frozenset[WorkerId]:
        return frozenset(worker_id for worker_id, worker in self._workers.items() if worker.epoch is not None)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that at least one worker holds."""
        return self._sets.num_entries

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes

    def position(self, worker_id: WorkerId) -> tuple[str, int] | None:
        """(epoch, sequence) up to which a worker is known; None for an unknown one."""
        worker = self._workers.get(worker_id)
        return None if worker is None or worker.epoch is None else (worker.epoch, worker.sequence)

    def num_held(self, worker_id: WorkerId) -> int:
        worker = self._workers.get(worker_id)
        return 0 if worker is None or not worker.bit else self._sets.count(worker.bit)

    def apply(self, batch: EventBatch) -> None:
        worker = self._worker(batch.worker_id)
        if batch.epoch in worker.dead_epochs:
            self.counters.dead_epoch_batches += 1
            return
        if batch.epoch != worker.epoch:
            self._begin(worker, batch.epoch)
        if batch.sequence <= worker.sequence:
            self.counters.duplicate_batches += 1
            return
        if batch.sequence != worker.sequence + 1 and not worker.has_gap:
            self.counters.gaps += 1
            worker.has_gap = True
        if worker.has_gap:
            worker.pending.append(batch)
        self._apply_events(worker, batch)

    def apply_snapshot(self, snapshot: Snapshot) -> None:
        """Replaces what is believed, then repeats batches that came after the snapshot was taken."""
        worker = self._worker(snapshot.worker_id)
        is_current = snapshot.epoch == worker.epoch
        is_older = is_current and not worker.has_gap and snapshot.sequence < worker.sequence
        if snapshot.epoch in worker.dead_epochs or is_older:
            self.counters.stale_snapshots += 1
            return
        later = [batch for batch in worker.pending if batch.sequence > snapshot.sequence] if is_current else []
        self.counters.snapshots += 1
        self._begin(worker, snapshot.epoch)
        worker.sequence = snapshot.sequence
        for start in range(0, len(snapshot.keys), APPLY_CHUNK):
            self._store(worker.bit, np.unique(fingerprints(snapshot.keys[start : start + APPLY_CHUNK])))
        for batch in later:
            self.apply(batch)

    def drop_worker(self, worker_id: WorkerId) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None and worker.epoch is not None:
            self.counters.dropped_workers += 1
            self._begin(worker, None)
            self._release(worker_id, worker)

    def expect_epoch(self, worker_id: WorkerId, epoch: str) -> None:
        """An authority says which life is current: corrects an epoch that was taken for dead, or for alive."""
        worker = self._worker(worker_id)
        if epoch in worker.dead_epochs:
            worker.dead_epochs.remove(epoch)
        if worker.epoch not in (epoch, None):
            self._begin(worker, None)

    def speculate(self, worker_id: WorkerId, keys: Sequence[BlockKey], ttl_s: float) -> None:
        """Believes for `ttl_s` that the worker holds `keys`: what a request routed just now will store."""
        self._speculation.add(self._worker(worker_id).bit, fingerprints(keys).tolist(), ttl_s)

    def match(self, keys: Sequence[BlockKey]) -> dict[WorkerId, int]:
        matched: dict[WorkerId, int] = {}
        masks = self._sets.masks
        self._speculation.expire()
        alive = -1
        for start in range(0, len(keys), MATCH_CHUNK):
            prints = fingerprints(keys[start : start + MATCH_CHUNK])
            owners = [masks[number] for number in self._table.get(prints).tolist()]
            if self._speculation:
                owners = self._speculation.extend(prints.tolist(), owners)
            last = None
            for depth, mask in enumerate(owners, start):
                if mask is last:  # runs of blocks with the same owners are the rule
                    continue
                last = mask
                left = alive & mask
                if left != alive:
                    if depth:
                        self._note(matched, alive ^ left, depth)
                    if not left:
                        return matched
                    alive = left
        if alive > 0:
            self._note(matched, alive, len(keys))
        return matched

    def keys(self, worker_id: WorkerId) -> frozenset[bytes]:
        worker = self._workers.get(worker_id)
        if worker is None or not worker.bit:
            return frozenset()
        holding = np.array(self._sets.holding(worker.bit), dtype=np.uint32)
        return frozenset(
            packed for prints, values in self._table.items() for packed in _split(prints[np.isin(values, holding)])
        )

    def _worker(self, worker_id: WorkerId) -> _Worker:
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker()
        if not worker.bit:
            worker.bit = self._free_bits.pop() if self._free_bits else 1 << len(self._by_bit)
            self._by_bit[worker.bit] = worker_id
        return worker

    def _release(self, worker_id: WorkerId, worker: _Worker) -> None:
        """Gives the bit to whoever comes next; what remains remembers the dead epochs, for the last so many workers."""
        del self._by_bit[worker.bit]
        self._free_bits.append(worker.bit)
        worker.bit = 0
        self._workers[worker_id] = self._workers.pop(worker_id)
        if len(self._workers) - len(self._by_bit) > MAX_DEAD_WORKERS:
            del self._workers[next(known for known, each in self._workers.items() if not each.bit)]

    def _begin(self, worker: _Worker, epoch: str | None) -> None:
        """Starts another life, or the same one afresh, from nothing."""
        if worker.epoch is not None and worker.epoch != epoch:
            worker.dead_epochs.append(worker.epoch)
        worker.epoch, worker.sequence, worker.has_gap = epoch, 0, False
        worker.pending.clear()
        self._clear(worker.bit)

    def _clear(self, bit: int) -> None:
        self._speculation.drop(bit)
        self._sets.forget(bit)
        if 2 * self._sets.num_abandoned > len(self._table):
            self._table.compact()

    def _apply_events(self, worker: _Worker, batch: EventBatch) -> None:
        self.counters.batches += 1
        worker.sequence = batch.sequence
        cleared, held = net_effect(batch.events)
        if cleared:
            self._clear(worker.bit)
        stored = [BlockKey(key) for key, is_held in held.items() if is_held]
        removed = [BlockKey(key) for key, is_held in held.items() if not is_held]
        for start in range(0, len(removed), APPLY_CHUNK):
            self._remove(worker.bit, np.unique(fingerprints(removed[start : start + APPLY_CHUNK])))
        for start in range(0, len(stored), APPLY_CHUNK):
            self._store(worker.bit, np.unique(fingerprints(stored[start : start + APPLY_CHUNK])))

    def _store(self, bit: int, prints: Fingerprints) -> None:
        self._table.reserve(prints.size)
        self._table.put(prints, self._sets.add(self._table.get(prints), bit))

    def _remove(self, bit: int, prints: Fingerprints) -> None:
        self._table.reserve(0)
        self._speculation.discard(bit, prints.tolist())
        self._table.put(prints, self._sets.remove(self._table.get(prints), bit))

    def _note(self, matched: dict[WorkerId, int], mask: int, depth: int) -> None:
        while mask > 0:
            bit = mask & -mask
            matched[self._by_bit[bit]] = depth
            mask ^= bit


def _split(prints: Fingerprints) -> list[bytes]:
    packed = prints.astype("<u8").tobytes()
    return [packed[start : start + 8] for start in range(0, len(packed), 8)]
