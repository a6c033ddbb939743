"""Prints what scheduling, checking and updating cost per decode step at batch 8, without the model.

    python tests/workers/measure_engine_overhead.py

CPU time of the step thread, so that a busy machine does not blur it; off and check interleaved in one process.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine_builders import make_request
from fake_runner import SECRET, FakeModelRunner, fake_identity

from cache_service.block_key import BlockKeyer
from workers.build import build_engine
from workers.config import EngineConfig, IsolationCheck
from workers.engine import LLMEngine
from workers.step import SampledToken, StepInput, StepOutput

NUM_BLOCKS = 2000


class IdleRunner(FakeModelRunner):
    """Answers at once, so that only the engine's own work is left."""

    def execute(self, step: StepInput) -> StepOutput:
        return StepOutput([[SampledToken(5) for _ in row.samples] for row in step.rows])


def decoding_engine(check: IsolationCheck, num_prompt_tokens: int, num_steps: int = 500) -> LLMEngine:
    """Eight sequences, each with more than `num_steps` decode steps before it."""
    keyer = BlockKeyer(SECRET, fake_identity(16))
    runner = IdleRunner(num_blocks=NUM_BLOCKS, block_size=16, max_model_len=4096)
    config = EngineConfig(num_blocks=NUM_BLOCKS, max_model_len=4096, isolation_check=check)
    engine = build_engine(config, runner, keyer)
    for i in range(8):
        prompt = [(i * 77 + j) % 900 for j in range(num_prompt_tokens)]
        engine.add_request(make_request(prompt, num_steps + 500, user=f"user-{i}", keyer=keyer))
    while engine.scheduler.waiting or any(seq.num_new_tokens > 1 for seq in engine.scheduler.running):
        engine.step()
    return engine


def step_s(engine: LLMEngine, num_steps: int) -> float:
    """CPU seconds of one step, the runner's own (trivial) work included."""
    started = time.thread_time()
    for _ in range(num_steps):
        engine.step()
    return (time.thread_time() - started) / num_steps


def step_opcodes(engine: LLMEngine, num_steps: int) -> float:
    """Python's instructions in one step, as many on every machine. What C does in one go counts as one."""
    num_opcodes = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_opcodes
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num_opcodes += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(num_steps):
            engine.step()
    finally:
        sys.settrace(before)
    return num_opcodes / num_steps


def main() -> None:
    for num_prompt_tokens in (50, 1000, 3000):
        times: dict[IsolationCheck, list[float]] = {IsolationCheck.OFF: [], IsolationCheck.CHECK: []}
        for _ in range(5):
            for check, measured in times.items():
                measured.append(step_s(decoding_engine(check, num_prompt_tokens), 300))
        off, checked = (median(measured) * 1e6 for measured in times.values())
        print(
            f"{num_prompt_tokens:5} prompt tokens: {off:4.0f} us per step, with the structure check {checked:4.0f} us"
        )


if __name__ == "__main__":
    main()
