"""Whose prompt goes next: the tenant with least running, so that a flood waits behind the others."""

from __future__ import annotations

from engine_builders import make_engine, make_request

from workers.engine import LLMEngine

NUM_FLOODING = 6


def _engine() -> LLMEngine:
    """64 tokens of prompts a step, which one prompt may have alone."""
    return make_engine(
        num_blocks=400,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_shared_prefill_tokens=64,
        max_shared_chunk_tokens=64,
        prefix_caching=False,
    )


def steps_to_first_token(small_tenant: str) -> int:
    """Steps from the arrival of a prompt of two chunks behind a flood whose prompts are longer, until its token."""
    engine = _engine()
    for number in range(NUM_FLOODING):
        engine.add_request(make_request([number] * 150, 4, tenant="flood", user=f"user-{number}"))
    engine.step()
    small = make_request([99] * 100, 4, tenant=small_tenant)
    engine.add_request(small)
    for count in range(1, 100):
        outputs = engine.step()
        if any(output.request_id == small.request_id and output.deltas for output in outputs):
            return count
    raise AssertionError("no token within 100 steps")


def test_a_small_tenant_is_served_before_what_the_flood_has_queued() -> None:
    assert steps_to_first_token("small") <= 3


def test_within_a_tenant_it_is_first_come_first_served() -> None:
    assert steps_to_first_token("flood") > NUM_FLOODING


def test_a_tenant_that_keeps_coming_does_not_stop_the_others() -> None:
    engine = _engine()
    slow = make_request([1] * 150, 2, tenant="slow")
    engine.add_request(slow)
    for number in range(100):
        engine.add_request(make_request([number % 50] * 60, 1, tenant=f"tenant-{number}"))
        if any(output.request_id == slow.request_id and output.deltas for output in engine.step()):
            return
    raise AssertionError("the long prompt never got on")
