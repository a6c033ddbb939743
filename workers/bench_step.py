"""Times single steps of the model runner against the machine's own floor, measured in the same run.

    python -m workers.bench_step [--model M] [--dtype bfloat16] [--kernel native] [--threads N] [--clock wall|cpu]

Decode's floor is weights plus KV over the memory's read rate, prefill's is the products' work over the product rate;
both rates are the best that anything reached here. `--clock cpu` with one thread leaves out what other processes took.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import torch

from cluster.api.sampling import SamplingParams
from workers.model.native_model import NativeModel
from workers.model_loader import load_runner
from workers.model_runner import CpuModelRunner
from workers.native.arena import huge_zeros
from workers.native.build import NativeUnavailableError, load_library, supported_isas
from workers.native.structs import PHASE_NAMES
from workers.runner_config import RunnerConfig
from workers.step import SampleInput, StepInput, StepRow

_READ_BYTES = 256 << 20
_GREEDY = SampleInput(SamplingParams(max_tokens=1, seed=0, temperature=0.0), 0, 0, (), ())


@dataclass(frozen=True)
class Workload:
    """`rows` sequences, each with `context` tokens in the cache and `new` to compute."""

    name: str
    rows: int
    context: int
    new: int


WORKLOADS = (
    Workload("decode batch 1, context 650", 1, 650, 1),
    Workload("decode batch 8, context 300", 8, 300, 1),
    Workload("decode batch 8, context 650", 8, 650, 1),
    Workload("decode batch 32, context 650", 32, 650, 1),
    Workload("prefill 512", 1, 0, 512),
    Workload("prefill 512 after 600", 1, 600, 512),
)


@dataclass
class Measurement:
    name: str
    step_ms: float
    floor_ms: float
    fraction_of_floor: float
    phases_ms: dict[str, float] = field(default_factory=dict)


def main() -> None:
    options = _parse()
    blocks = 32 * (650 // 16 + 1) + 64
    config = RunnerConfig(
        model=options.model, dtype=options.dtype, kernel=options.kernel, num_blocks=blocks, threads=options.threads
    )
    runner = load_runner(config)
    clock = time.thread_time if options.clock == "cpu" else time.perf_counter
    if options.clock == "cpu" and torch.get_num_threads() != 1:
        raise SystemExit("--clock cpu counts one thread: add --threads 1")
    # Pages that nobody wrote are all the same page of zeros and would never leave the cache.
    runner.fill_blocks(range(blocks), 0.01)
    steps = {workload: _make_step(workload, runner.block_size) for workload in WORKLOADS}
    best: dict[Workload, Measurement] = {}
    read_rate = product_rate = 0.0
    for _ in range(options.rounds):  # in turn, so that a disturbance does not fall on one workload alone
        read_rate = max(read_rate, *(measure_read_rate(clock) for _ in range(3)))
        product_rate = max(product_rate, measure_product_rate(clock, runner.model.dtype))
        for workload, step in steps.items():
            found = _measure(runner, workload, step, clock)
            if workload not in best or found.step_ms < best[workload].step_ms:
                best[workload] = found
    for workload, found in best.items():
        found.floor_ms = 1e3 * _floor_s(runner, workload, read_rate, product_rate)
        found.fraction_of_floor = found.floor_ms / found.step_ms
    _report(runner, list(best.values()), read_rate, product_rate, options)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser.parse_args()


def _make_step(workload: Workload, block_size: int) -> StepInput:
    blocks = -(-(workload.context + workload.new) // block_size)
    rows = [
        StepRow(
            seq_id=index,
            start=workload.context,
            token_ids=list(range(100 + index, 100 + index + workload.new)),
            block_table=list(range(index * blocks, (index + 1) * blocks)),
            samples=(_GREEDY,),
        )
        for index in range(workload.rows)
    ]
    return StepInput(step_id=0, rows=rows)


def _measure(runner: CpuModelRunner, workload: Workload, step: StepInput, clock: Callable[[], float]) -> Measurement:
    model = runner.model
    if isinstance(model, NativeModel):
        model.measure_phases(True)
        ctypes.memset(model.phase_ns, 0, ctypes.sizeof(model.phase_ns))
    started = clock()
    runner.execute(step)
    step_ms = 1e3 * (clock() - started)
    phases: dict[str, float] = {}
    if isinstance(model, NativeModel):
        phases = {name: round(ns / 1e6, 3) for name, ns in zip(PHASE_NAMES, model.phase_ns, strict=True)}
        phases["python and sampling"] = round(step_ms - sum(phases.values()), 3)
    return Measurement(workload.name, step_ms, 0.0, 0.0, phases)


def measure_read_rate(clock: Callable[[], float]) -> float:
    """Bytes per second that all threads together read from memory."""
    memory = _read_buffer()
    threads = torch.get_num_threads()
    share = len(memory) // threads // 1024 * 1024
    try:
        library = load_library(supported_isas()[0])
    except NativeUnavailableError:
        started = clock()
        memory.view(torch.int64).sum()
        return len(memory) / (clock() - started)
    if threads == 1:
        started = clock()
        library.ww_read(memory.data_ptr(), share)
        return share / (clock() - started)
    with ThreadPoolExecutor(threads) as pool:
        started = clock()
        list(pool.map(lambda index: library.ww_read(memory.data_ptr() + index * share, share), range(threads)))
        return threads * share / (clock() - started)


_buffers: list[torch.Tensor] = []


def _read_buffer() -> torch.Tensor:
    if not _buffers:
        _buffers.append(huge_zeros(_READ_BYTES))
        _buffers[0].fill_(1)
    return _buffers[0]


def measure_product_rate(clock: Callable[[], float], dtype: torch.dtype) -> float:
    """Operations per second of torch's product of two square matrices that fit the caches."""
    a, b = (torch.ones(1024, 1024, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(3):
        started = clock()
        torch.mm(a, b)
        best = max(best, 2 * 1024**3 / (clock() - started))
    return best


def _floor_s(runner: CpuModelRunner, workload: Workload, read_rate: float, product_rate: float) -> float:
    """The slower of reading everything once and computing everything once."""
    spec, size = runner.model.spec, runner.model.dtype.itemsize
    head = spec.vocab_size * spec.hidden_size
    tokens = workload.rows * workload.new
    weights = spec.flops_per_token() // 2 + head
    cached = workload.rows * (workload.context + workload.new) * spec.kv_bytes_per_token(size)
    pairs = workload.rows * sum(workload.context + index + 1 for index in range(workload.new))
    attention = 4 * pairs * spec.q_size * spec.num_layers
    work = tokens * spec.flops_per_token() + 2 * workload.rows * head + attention
    return max((weights * size + cached) / read_rate, work / product_rate)


def _report(
    runner: CpuModelRunner, found: list[Measurement], read_rate: float, product_rate: float, options: argparse.Namespace
) -> None:
    facts = {
        "model": runner.identity.model,
        "dtype": runner.identity.dtype,
        "kernel": runner.model.kernel,
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "read_gb_s": round(read_rate / 1e9, 1),
        "product_gflop_s": round(product_rate / 1e9),
    }
    if options.json:
        print(json.dumps({**facts, "steps": [asdict(one) for one in found]}))
        return
    print("  ".join(f"{name}={value}" for name, value in facts.items()))
    for one in found:
        print(f"{one.name:30} {one.step_ms:8.2f} ms   floor {one.floor_ms:7.2f} ms   {one.fraction_of_floor:5.0%}")
        parts = [f"{name} {ms:.2f}" for name, ms in one.phases_ms.items() if ms >= 0.05]
        if parts:
            print(f"{'':30} {', '.join(parts)}")


if __name__ == "__main__":
    main()
