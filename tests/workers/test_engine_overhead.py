"""The engine's own work per step stays far below what a step of the model takes, however long the prompts are."""

from __future__ import annotations

from measure_engine_overhead import decode_step_s

from workers.config import IsolationCheck


def test_a_decode_step_at_batch_8_costs_less_than_a_millisecond_of_cpu() -> None:
    assert decode_step_s(IsolationCheck.CHECK, 3000, num_steps=100) < 1e-3


def test_without_the_check_a_step_does_not_depend_on_the_prompts_length() -> None:
    short, long = (decode_step_s(IsolationCheck.OFF, length, num_steps=150) for length in (50, 3000))
    assert long < 3 * short
