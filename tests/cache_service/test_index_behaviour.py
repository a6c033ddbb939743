"""What every prefix index does, in memory, in Redis (one and three shards) and in memory fed from Redis."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from index_harness import (
    FollowerHarness,
    Harness,
    MemoryHarness,
    RedisHarness,
    keys,
    prints,
    removed,
    settings_of,
    stored,
)

from cache_service.events import AllBlocksCleared, BlockEvent, EventBatch, Snapshot
from cluster.api.ids import WorkerId

A, B, C = WorkerId("worker-a"), WorkerId("worker-b"), WorkerId("worker-c")


@pytest.fixture(params=["memory", "redis", "redis-3-shards", "follower"])
async def index(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Harness]:
    harness: Harness
    if request.param == "memory":
        harness = MemoryHarness()
    else:
        url = request.getfixturevalue("redis_server").url
        settings = settings_of(namespace, num_shards=3 if request.param == "redis-3-shards" else 1)
        harness = FollowerHarness(url, settings) if request.param == "follower" else RedisHarness(url, settings)
    yield harness
    await harness.aclose()


def batch(worker_id: WorkerId, sequence: int, *events: BlockEvent, epoch: str = "e1") -> EventBatch:
    return EventBatch(worker_id, epoch, sequence, events)


async def test_each_worker_is_credited_with_its_leading_blocks(index: Harness) -> None:
    await index.apply(batch(A, 1, stored(1, 2, 3, 4)))
    await index.apply(batch(B, 1, stored(1, 2)))
    await index.apply(batch(C, 1, stored(9)))
    assert await index.match(keys(1, 2, 3, 4, 5)) == {A: 4, B: 2}
    assert await index.match(keys(9)) == {C: 1}


async def test_nothing_matches_nothing(index: Harness) -> None:
    assert await index.match(()) == {}
    assert await index.match(keys(1)) == {}
    await index.apply(batch(A, 1, stored(1)))
    assert await index.match(()) == {}


async def test_a_hole_ends_the_match(index: Harness) -> None:
    await index.apply(batch(A, 1, stored(1, 3)))
    await index.apply(batch(B, 1, stored(2, 3)))
    assert await index.match(keys(1, 2, 3)) == {A: 1}


async def test_events_of_a_batch_count_in_their_order(index: Harness) -> None:
    await index.apply(batch(A, 1, stored(1), removed(1), stored(1, 2), removed(2)))
    assert await index.keys(A) == prints(1)


async def test_removed_blocks_are_gone_for_that_worker_only(index: Harness) -> None:
    await index.apply(batch(A, 1, stored(1, 2)))
    await index.apply(batch(B, 1, stored(1, 2)))
    await index.apply(batch(A, 2, removed(2, 77)))
    assert await index.match(keys(1, 2)) == {A: 1, B: 2}


async def test_a_repeated_batch_changes_nothing(index: Harness) -> None:
    first = batch(A, 1, stored(1))
    await index.apply(first)
    await index.apply(batch(A, 2, removed(1), stored(2)))
    await index.apply(first)
    assert await index.keys(A) == prints(2)


async def test_a_restarted_worker_inherits_nothing(index: Harness) -> None:
    await index.apply(batch(A, 1, stored(1, 2)))
    await index.apply(batch(B, 1, stored(1)))
    assert await index.match(keys(1, 2)) == {A: 2, B: 1}
    await index.apply(batch(A, 1, stored(5), epoch="e2"))
    assert await index.match(keys(1, 2)) == {B: 1}
    assert await index.keys(A) == prints(5)


async def test_late_events_of_a_dead_epoch_are_dropped(index: Harness) -> None:
    await index.apply(batch(A, 1, stored(1)))
    await index.apply(batch(A, 1, stored(5), epoch="e2"))
    await index.apply(batch(A, 2, stored(2, 3)))
    await index.apply_snapshot(Snapshot(A, "e1", 3, keys(1, 2, 3)))
    assert await index.keys(A) == prints(5)
    await index.apply(batch(A, 2, stored(6), epoch="e2"))
    assert await index.keys(A) == prints(5, 6)


async def test_a_missing_batch_asks_for_a_snapshot_that_heals(index: Harness) -> None:
    await index.apply(batch(A, 1, stored(1, 2)))
    assert await index.asked_for_snapshot() == frozenset()
    await index.apply(batch(A, 3, stored(4)))
    assert await index.asked_for_snapshot() == {A}
    await index.apply_snapshot(Snapshot(A, "e1", 3, keys(1, 4, 5)))
    assert await index.keys(A) == prints(1, 4, 5)
    await index.apply(batch(A, 4, removed(5)))
    assert await index.keys(A) == prints(1, 4)


async def test_clearing_all_blocks_leaves_what_is_stored_afterwards(index: Harness) -> None:
    await index.apply(batch(A, 1, stored(1, 2)))
    await index.apply(batch(B, 1, stored(1, 2)))
    await index.apply(batch(A, 2, stored(3), AllBlocksCleared(), stored(1)))
    assert await index.keys(A) == prints(1)
    assert await index.match(keys(1, 2)) == {A: 1, B: 2}
    await index.apply(batch(A, 3, AllBlocksCleared()))
    assert await index.keys(A) == prints()
    await index.apply(batch(A, 4, stored(8)))
    assert await index.keys(A) == prints(8)


async def test_a_snapshot_replaces_what_was_believed(index: Harness) -> None:
    await index.apply(batch(A, 1, stored(1, 2)))
    await index.apply_snapshot(Snapshot(A, "e1", 7, keys(2, 3)))
    assert await index.keys(A) == prints(2, 3)
    await index.apply(batch(A, 8, stored(4)))
    assert await index.keys(A) == prints(2, 3, 4)
    assert await index.asked_for_snapshot() == frozenset()


async def test_a_dropped_worker_matches_nothing_and_others_stay(index: Harness) -> None:
    await index.apply(batch(A, 1, stored(1)))
    await index.apply(batch(B, 1, stored(1)))
    assert await index.match(keys(1)) == {A: 1, B: 1}
    await index.drop_worker(A)
    assert await index.match(keys(1)) == {B: 1}
    await index.apply(batch(A, 1, stored(1), epoch="e2"))
    assert await index.match(keys(1)) == {A: 1, B: 1}


async def test_many_workers_may_hold_one_block(index: Harness) -> None:
    names = [WorkerId(f"worker-{number}") for number in range(24)]
    for number, name in enumerate(names):
        await index.apply(batch(name, 1, stored(*range(number + 1))))
    assert await index.match(keys(*range(24))) == {name: number + 1 for number, name in enumerate(names)}


async def test_thousands_of_blocks_are_all_found(index: Harness) -> None:
    """Enough for the buckets in Redis to split many times, and for the table in memory to grow."""
    await index.apply(batch(A, 1, stored(*range(6000))))
    await index.apply(batch(B, 1, stored(*range(0, 6000, 2))))
    assert await index.keys(A) == prints(*range(6000))
    await index.apply(batch(A, 2, removed(*range(3000, 6000))))
    assert await index.keys(A) == prints(*range(3000))
    assert await index.keys(B) == prints(*range(0, 6000, 2))
    assert await index.match(keys(*range(64))) == {A: 64, B: 1}


async def test_random_histories_equal_a_naive_model(index: Harness) -> None:
    dice = random.Random(7)
    model: dict[WorkerId, set[int]] = {A: set(), B: set(), C: set()}
    lives = {name: [0, 0] for name in model}  # epoch, sequence
    for _ in range(60):
        name = dice.choice([A, B, C])
        lives[name][1] += 1
        numbers = [dice.randrange(40) for _ in range(dice.randrange(1, 12))]
        event: BlockEvent
        match dice.randrange(12):
            case 0:
                event, model[name] = AllBlocksCleared(), set()
            case 1:
                lives[name] = [lives[name][0] + 1, 1]
                event, model[name] = stored(*numbers), set(numbers)
            case 2 | 3 | 4:
                event = removed(*numbers)
                model[name] -= set(numbers)
            case _:
                event = stored(*numbers)
                model[name] |= set(numbers)
        epoch, sequence = lives[name]
        await index.apply(batch(name, sequence, event, epoch=f"e{epoch}"))
    for name, held in model.items():
        assert await index.keys(name) == prints(*held)
    for _ in range(20):
        prompt = [dice.randrange(40) for _ in range(8)]
        assert await index.match(keys(*prompt)) == _naive_match(model, prompt)


def _naive_match(model: dict[WorkerId, set[int]], prompt: list[int]) -> dict[WorkerId, int]:
    depths = {}
    for name, held in model.items():
        depth = next((at for at, number in enumerate(prompt) if number not in held), len(prompt))
        if depth:
            depths[name] = depth
    return depths
