"""The engine's own work per step stays far below what a step of the model takes, however long the prompts are.

Counted in instructions, which are as many on every machine: where the bound was set, 70,000 of them took a millisecond.
The one comparison of times is of the quickest of many short stretches, taken in turn.
"""

from __future__ import annotations

from measure_engine_overhead import decoding_engine, step_opcodes, step_s

from workers.config import IsolationCheck


def test_a_decode_step_at_batch_8_costs_less_than_a_millisecond_of_python() -> None:
    assert step_opcodes(decoding_engine(IsolationCheck.CHECK, 3000), num_steps=16) < 45_000


def test_without_the_check_a_step_does_not_depend_on_the_prompts_length() -> None:
    short, long = (decoding_engine(IsolationCheck.OFF, length) for length in (50, 3000))
    assert step_opcodes(long, num_steps=16) < 1.2 * step_opcodes(short, num_steps=16)
    times = [(step_s(short, 5), step_s(long, 5)) for _ in range(30)]
    quickest = [min(side) for side in zip(*times, strict=True)]
    assert quickest[1] < 3 * quickest[0], "something that is one instruction to Python"
