"""What the in-memory index adds to the common behaviour: speculation, authority over epochs, growth, exactness."""

from __future__ import annotations

import random

import numpy as np
import pytest
from index_harness import key, keys, prints, removed, stored

from cache_service.events import AllBlocksCleared, EventBatch, Snapshot
from cache_service.fingerprint_table import SPREAD, FingerprintTable
from cache_service.fingerprints import fingerprints
from cache_service.prefix_index import InMemoryPrefixIndex
from cluster.api.ids import BlockKey, WorkerId

A, B = WorkerId("worker-a"), WorkerId("worker-b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def batch(sequence: int, *events: object, worker_id: WorkerId = A, epoch: str = "e1") -> EventBatch:
    return EventBatch(worker_id, epoch, sequence, events)  # type: ignore[arg-type]


def test_speculation_is_believed_until_its_time_is_over() -> None:
    clock = Clock()
    index = InMemoryPrefixIndex(clock=clock)
    index.apply(batch(1, stored(1), worker_id=B))
    index.speculate(A, keys(1, 2), ttl_s=2.0)
    assert index.match(keys(1, 2, 3)) == {A: 2, B: 1}
    clock.now = 1.9
    assert index.match(keys(1, 2, 3)) == {A: 2, B: 1}
    clock.now = 2.0
    assert index.match(keys(1, 2, 3)) == {B: 1}


def test_speculation_gives_way_to_events() -> None:
    clock = Clock()
    index = InMemoryPrefixIndex(clock=clock)
    index.apply(batch(1))
    index.speculate(A, keys(1, 2), ttl_s=2.0)
    index.apply(batch(2, stored(1)))
    index.apply(batch(3, removed(2)))
    assert index.match(keys(1, 2)) == {A: 1}
    clock.now = 5.0
    assert index.match(keys(1, 2)) == {A: 1}, "what was stored stays when the speculation ends"


def test_repeated_speculation_is_prolonged() -> None:
    clock = Clock()
    index = InMemoryPrefixIndex(clock=clock)
    index.speculate(A, keys(1), ttl_s=2.0)
    clock.now = 1.0
    index.speculate(A, keys(1), ttl_s=2.0)
    clock.now = 2.5
    assert index.match(keys(1)) == {A: 1}
    clock.now = 3.0
    assert index.match(keys(1)) == {}


@pytest.mark.parametrize("end", ["drop", "restart", "clear"])
def test_speculation_ends_with_the_life_it_was_about(end: str) -> None:
    index = InMemoryPrefixIndex(clock=Clock())
    index.apply(batch(1))
    index.speculate(A, keys(1), ttl_s=9.0)
    assert index.match(keys(1)) == {A: 1}
    if end == "drop":
        index.drop_worker(A)
    else:
        index.apply(batch(1, stored(7), epoch="e2") if end == "restart" else batch(2, AllBlocksCleared()))
    assert index.match(keys(1)) == {}


def test_batches_after_a_gap_outlive_an_older_snapshot() -> None:
    index = InMemoryPrefixIndex()
    index.apply(batch(1, stored(1)))
    index.apply(batch(3, stored(3)))
    index.apply(batch(4, stored(4), removed(1)))
    assert index.needs_snapshot == {A}
    index.apply_snapshot(Snapshot(A, "e1", 2, keys(1, 2)))
    assert index.keys(A) == prints(2, 3, 4)
    assert index.position(A) == ("e1", 4)
    assert index.needs_snapshot == frozenset()


def test_a_snapshot_that_does_not_cover_the_gap_asks_again() -> None:
    index = InMemoryPrefixIndex()
    index.apply(batch(1, stored(1)))
    index.apply(batch(5, stored(5)))
    index.apply_snapshot(Snapshot(A, "e1", 2, keys(1)))
    assert index.needs_snapshot == {A}
    index.apply_snapshot(Snapshot(A, "e1", 5, keys(1, 5)))
    assert index.needs_snapshot == frozenset()
    assert index.keys(A) == prints(1, 5)


def test_an_older_snapshot_does_not_undo_batches() -> None:
    index = InMemoryPrefixIndex()
    index.apply(batch(1, stored(1)))
    index.apply(batch(2, stored(2)))
    index.apply_snapshot(Snapshot(A, "e1", 1, keys(1)))
    assert index.keys(A) == prints(1, 2)
    assert index.counters.stale_snapshots == 1


def test_a_life_first_seen_in_its_middle_needs_a_snapshot() -> None:
    index = InMemoryPrefixIndex()
    index.apply(batch(7, stored(7)))
    assert index.needs_snapshot == {A}
    assert index.match(keys(7)) == {A: 1}


def test_a_dropped_worker_stays_dead_until_an_authority_says_otherwise() -> None:
    index = InMemoryPrefixIndex()
    index.apply(batch(1, stored(1)))
    index.drop_worker(A)
    index.apply(batch(2, stored(2)))
    assert index.match(keys(2)) == {}
    assert index.counters.dead_epoch_batches == 1
    index.expect_epoch(A, "e1")
    index.apply_snapshot(Snapshot(A, "e1", 2, keys(1, 2)))
    assert index.match(keys(1, 2)) == {A: 2}


def test_an_authority_ends_an_epoch_that_was_taken_for_alive() -> None:
    index = InMemoryPrefixIndex()
    index.apply(batch(1, stored(1)))
    index.expect_epoch(A, "e2")
    assert index.match(keys(1)) == {}
    index.apply(batch(2, stored(2)))
    assert index.match(keys(2)) == {}, "its late events are dropped"
    index.apply(batch(1, stored(3), epoch="e2"))
    assert index.keys(A) == prints(3)


def test_places_of_dead_workers_are_used_again() -> None:
    """Ten thousand short-lived workers neither slow the index down nor mix with one another."""
    index = InMemoryPrefixIndex()
    index.apply(batch(1, stored(1, 2), worker_id=B))
    for number in range(10_000):
        name = WorkerId(f"worker-{number}")
        index.apply(batch(1, stored(1), worker_id=name))
        if number % 1000 == 0:
            assert index.match(keys(1, 2)) == {B: 2, name: 1}
        index.drop_worker(name)
    assert index.match(keys(1, 2)) == {B: 2}
    assert index.workers == {B}


def test_blocks_that_nobody_holds_leave_the_table() -> None:
    index = InMemoryPrefixIndex()
    for epoch in range(40):
        index.apply(batch(1, stored(*range(epoch * 1000, epoch * 1000 + 1000)), epoch=f"e{epoch}"))
    assert index.num_blocks == 1000
    assert index.num_bytes < 1_000_000, "forty lives took no forty times the memory"
    assert index.keys(A) == prints(*range(39_000, 40_000))


def test_cut_keys_are_as_good_as_whole_ones_and_shorter_ones_are_refused() -> None:
    index = InMemoryPrefixIndex()
    index.apply(batch(1, stored(1)))
    assert index.match([BlockKey(key(1)[:8])]) == {A: 1}
    with pytest.raises(ValueError, match="fewer than 8 bytes"):
        index.match([BlockKey(b"short")])


def test_the_reserved_fingerprint_is_a_key_like_any_other() -> None:
    index = InMemoryPrefixIndex()
    zero = BlockKey(bytes(32))
    assert index.match([zero]) == {}
    index.apply_snapshot(Snapshot(A, "e1", 1, (zero, key(1))))
    assert index.match([zero, key(1)]) == {A: 2}
    assert index.num_blocks == 2


@pytest.mark.parametrize("seed", range(5))
def test_the_table_equals_a_dictionary(seed: int) -> None:
    """Inserts, overwrites and erasures through several growths, with buckets that overflow."""
    dice = np.random.default_rng(seed)
    table = FingerprintTable(lambda values: np.ones(values.size, dtype=bool))
    model: dict[int, int] = {}
    unspread = np.uint64(pow(int(SPREAD), -1, 2**64))
    # Once the table has 8192 buckets, only every fourth is anyone's home: 22 entries each, where eight fit.
    crowded = (dice.integers(1, 2**64, 60_000, dtype=np.uint64) & ~np.uint64(3 << 51)) * unspread
    for _ in range(150):
        prints_ = np.unique(dice.choice(crowded, 600))
        values = dice.integers(0, 4, prints_.size).astype(np.uint32)
        table.reserve(prints_.size)
        table.put(prints_, values)
        for print_, value in zip(prints_.tolist(), values.tolist(), strict=True):
            model[print_] = value
    present = {print_: value for print_, value in model.items() if value}
    assert len(table) == len(present)
    assert table.get(crowded).tolist() == [model.get(print_, 0) for print_ in crowded.tolist()]
    items = {p: v for prints_, values in table.items() for p, v in zip(prints_.tolist(), values.tolist(), strict=True)}
    assert items == present


def test_random_lives_of_many_workers_equal_a_naive_model() -> None:
    dice = random.Random(11)
    index = InMemoryPrefixIndex()
    names = [WorkerId(f"worker-{number}") for number in range(70)]  # more than fit into a machine word
    model: dict[WorkerId, set[int]] = {name: set() for name in names}
    lives = {name: [0, 0] for name in names}
    for _ in range(4000):
        name = dice.choice(names)
        numbers = [dice.randrange(300) for _ in range(dice.randrange(1, 40))]
        lives[name][1] += 1
        kind = dice.random()
        if kind < 0.02:
            lives[name] = [lives[name][0] + 1, 0]
            index.drop_worker(name)
            model[name] = set()
            continue
        events = [AllBlocksCleared()] if kind < 0.04 else [removed(*numbers) if kind < 0.3 else stored(*numbers)]
        model[name] = set() if kind < 0.04 else model[name] - set(numbers) if kind < 0.3 else model[name] | set(numbers)
        index.apply(batch(lives[name][1], *events, worker_id=name, epoch=f"e{lives[name][0]}"))
    assert {name: index.keys(name) for name in names} == {name: prints(*held) for name, held in model.items()}
    assert index.num_blocks == len(set().union(*model.values()))
    assert [index.num_held(name) for name in names] == [len(model[name]) for name in names]
    for _ in range(300):
        prompt = [dice.randrange(300) for _ in range(5)]
        depths = {name: next((at for at, n in enumerate(prompt) if n not in model[name]), 5) for name in names}
        assert index.match(keys(*prompt)) == {name: depth for name, depth in depths.items() if depth}


def test_long_prompts_are_matched_in_pieces() -> None:
    index = InMemoryPrefixIndex()
    index.apply(batch(1, stored(*range(1000))))
    index.apply(batch(1, stored(*range(600)), worker_id=B))
    assert index.match(keys(*range(1200))) == {A: 1000, B: 600}
    assert fingerprints(keys(1, 2)).shape == (2,)
