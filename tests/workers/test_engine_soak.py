"""Thousands of requests with aborts: every block accounted for after each step, and nothing grows."""

from __future__ import annotations

import gc
import random
import sys

import pytest
from engine_builders import Transcript, make_engine, make_request, user_hash
from fake_runner import reference_tokens

from workers.config import IsolationCheck


def soak(num_requests: int, seed: int, num_compared: int) -> list[int]:
    """Returns the number of live memory blocks of the interpreter at each tenth of the way."""
    rng = random.Random(seed)
    engine = make_engine(num_blocks=60, isolation_check=IsolationCheck.CHECK, event_log_size=1000)
    stems = [[rng.randrange(900) for _ in range(24)] for _ in range(6)]
    num_added = num_aborted = num_checked = 0
    transcript, kept, memory = Transcript(), {}, []
    while num_added < num_requests or engine.has_work:
        while num_added < num_requests and len(engine.scheduler.waiting) < 4:
            prompt = [
                *rng.choice(stems)[: rng.randrange(25)],
                *(rng.randrange(900) for _ in range(rng.randrange(1, 6))),
            ]
            request = make_request(
                prompt, rng.randrange(1, 8), user=f"user-{rng.randrange(5)}", n=rng.choice([1, 1, 2])
            )
            engine.add_request(request)
            kept[request.request_id] = request
            num_added += 1
            if num_added % (num_requests // 10) == 0:
                gc.collect()
                memory.append(sys.getallocatedblocks())
        if rng.random() < 0.1 and kept:
            engine.abort(rng.choice(list(kept)))
            num_aborted += 1
        if rng.random() < 0.002:
            engine.purge_user(user_hash("acme", f"user-{rng.randrange(5)}"))
        transcript.add(engine.step())
        engine.drain_events()
        for request_id in transcript.finished:
            request = kept.pop(request_id)
            if num_checked < num_compared and all(r.value != "abort" for r in transcript.reasons[request_id].values()):
                num_checked += 1
                assert transcript.of(request) == reference_tokens(request)
        transcript = carry_over(transcript, kept)
    assert engine.pool.num_in_use == 0
    assert engine.violations == []
    assert num_aborted > num_requests // 100
    assert engine.pool.cache.counters.hits > num_requests // 10
    assert engine.pool.cache.counters.evictions > 0
    assert num_checked == num_compared
    return memory


def carry_over(transcript: Transcript, live: dict) -> Transcript:
    """Forgets finished requests, so that only the engine could be what grows."""
    fresh = Transcript()
    for request_id in live:
        if request_id in transcript.tokens:
            fresh.tokens[request_id] = transcript.tokens[request_id]
            fresh.reasons[request_id] = transcript.reasons[request_id]
    return fresh


def run_soak(num_requests: int, seed: int, num_compared: int) -> None:
    memory = soak(num_requests, seed, num_compared)
    settled, end = memory[2], memory[-1]
    assert end < settled + 5000, f"memory grew: {memory}"


def test_a_soak_loses_no_block_and_keeps_memory_flat() -> None:
    run_soak(3000, seed=1, num_compared=300)


@pytest.mark.slow
def test_a_long_soak_loses_no_block_and_keeps_memory_flat() -> None:
    run_soak(10_000, seed=2, num_compared=3000)
