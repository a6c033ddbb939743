"""Measures engine steps for `watchword simulate --engine shared --step-times FILE`.

    python tests/router/measure_step_times.py FILE [--threads N] [--repeats N]

Writes JSON Lines of [prefill tokens, decoding sequences, seconds] and prints the fitted cost. Each figure is the least
of several repeats, taken in turn, so that a busy machine blurs it little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

from cluster.api.sampling import SamplingParams
from router.simulate.step_cost import StepSample, fit_step_cost
from workers.model_loader import load_runner
from workers.model_runner import CpuModelRunner
from workers.runner_config import RunnerConfig
from workers.step import SampleInput, StepInput, StepRow

BLOCK_SIZE = 16
CONTEXT = 512  # tokens in the cache of a decoding sequence
SHAPES = [(p, d) for p in (0, 16, 64, 128, 256, 512) for d in (0, 1, 2, 4, 8) if p or d]


def _row(seq_id: int, start: int, num_tokens: int) -> StepRow:
    blocks_per_seq = (CONTEXT + 512) // BLOCK_SIZE
    table = range(seq_id * blocks_per_seq, seq_id * blocks_per_seq + blocks_per_seq)
    tokens = [(seq_id * 37 + position) % 1000 + 10 for position in range(num_tokens)]
    sample = SampleInput(SamplingParams(max_tokens=8, seed=1, temperature=0.0), 0, 0, tokens, [])
    return StepRow(seq_id, start, tokens, list(table), (sample,))


def _step(num_prefill: int, num_decoding: int) -> StepInput:
    rows = [_row(seq_id, CONTEXT, 1) for seq_id in range(1, num_decoding + 1)]
    if num_prefill:
        rows.append(_row(0, 0, num_prefill))
    return StepInput(1, rows)


def measure(runner: CpuModelRunner, repeats: int) -> list[StepSample]:
    for seq_id in range(9):  # something to attend to
        runner.execute(StepInput(0, [_row(seq_id, 0, CONTEXT)]))
    durations = defaultdict(list)
    for _ in range(repeats):
        for shape in SHAPES:
            step = _step(*shape)
            started = time.perf_counter()
            runner.execute(step)
            durations[shape].append(time.perf_counter() - started)
    return [StepSample(*shape, min(taken)) for shape, taken in durations.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    samples = measure(load_runner(RunnerConfig(threads=args.threads, self_test=False)), args.repeats)
    args.file.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    for sample in samples:
        shape = f"{sample.num_prefill_tokens:5} prefill, {sample.num_decoding:2} decoding"
        print(f"{shape}: {sample.duration_s * 1e3:8.2f} ms")
    print(fit_step_cost(samples))


if __name__ == "__main__":
    main()
