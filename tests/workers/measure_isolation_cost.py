"""What the isolation checks cost on the real model: `python tests/workers/measure_isolation_cost.py [PAIRS]`.

Engines with and without a check take steps in turn, in random order, on the same weights and at the same contexts; the
ratio of each pair is free of whatever else slows the machine down for longer than a step. Printed are the median of the
ratios with a bootstrap interval, and the time that the check itself took, which is the sharper figure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from cache_service.block_key import BlockKeyer
from cluster.api.ids import RequestId
from cluster.api.request import Request
from cluster.api.sampling import SamplingParams
from cluster.api.scope import Scope, ScopeFields, ScopeSpan
from cluster.experiment.targets.weights import LoadedModel, load_model
from workers.block_pool import BlockPool
from workers.build import EngineParts, build_engine
from workers.config import EngineConfig, IsolationCheck
from workers.engine import LLMEngine
from workers.isolation_check import IsolationChecker

BATCH = 8
PROMPT_TOKENS = 128
CONFIG = EngineConfig(num_blocks=1024, max_model_len=8192, max_num_seqs=BATCH, max_num_batched_tokens=512)
SECRET = b"s" * 32


class Stopwatch:
    """Total time inside the functions it was put around."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_calls = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - started
                self.num_calls += 1

        return timed


class Side:
    """One engine of the comparison. `step_seconds` are its steps in order."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.watch = Stopwatch()
        runner = loaded.make_runner(config)
        self.keyer = BlockKeyer(SECRET, runner.identity)
        self.engine: LLMEngine = build_engine(config, runner, self.keyer, self._parts())
        self.step_seconds: list[float] = []

    def _parts(self) -> EngineParts:
        def checker(config: EngineConfig, pool: BlockPool) -> IsolationChecker:
            made = IsolationChecker(config, pool)
            made.check = self.watch.around(made.check)  # type: ignore[method-assign]  # timed from outside
            return made

        def pool(config: EngineConfig, log: Any, checksum: Any) -> BlockPool:
            return BlockPool(config, log, None if checksum is None else self.watch.around(checksum))

        return EngineParts(checker=checker, block_pool=pool)

    def step(self) -> None:
        started = time.perf_counter()
        self.engine.step()
        self.step_seconds.append(time.perf_counter() - started)

    def add(self, prompt: Sequence[int], max_tokens: int, name: str) -> None:
        spans = (ScopeSpan(None, ScopeFields(Scope.USER, b"T" * 32, user=b"U" * 32)),)
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        keys = self.keyer.prompt_keys(prompt, spans)
        request = Request(RequestId(name), "m", tuple(prompt), sampling, spans, keys, b"T" * 32, b"U" * 32)
        self.engine.add_request(request)


def measure_decode(loaded: LoadedModel, num_pairs: int) -> None:
    """A decode step of 8 sequences, without and with the structure check."""
    sides = [Side(loaded, replace(CONFIG, isolation_check=mode)) for mode in (IsolationCheck.OFF, IsolationCheck.CHECK)]
    draw = Random(1)
    for number in range(BATCH):
        prompt = [draw.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
        for side in sides:
            side.add(prompt, num_pairs + 64, f"r{number}")
    for side in sides:
        while any(seq.num_new_tokens != 1 for seq in side.engine.scheduler.running) or side.engine.scheduler.waiting:
            side.engine.step()
        if not side.engine.scheduler.running:
            raise AssertionError("nothing decodes")
        side.watch.seconds = 0.0
    _take_turns(sides, lambda side: side.step(), num_pairs, draw)
    _report("structure check, decode of 8", sides[0].step_seconds, sides[1].step_seconds)
    share = sides[1].watch.seconds / sum(sides[1].step_seconds)
    per_step_us = 1e6 * sides[1].watch.seconds / num_pairs
    print(f"  inside the check: {per_step_us:.0f} us a step, {share:.2%} of the time")
    assert sides[1].engine.violations == []


def measure_checksums(loaded: LoadedModel, num_rounds: int) -> None:
    """Rounds of 8 requests: 128 tokens that hit, 64 new ones, 16 of output."""
    draw = Random(2)
    base = Side(loaded, CONFIG)
    for share in (0.1, 1.0):
        side = Side(loaded, replace(CONFIG, checksum_blocks=share))
        base.step_seconds.clear()
        heads = [[draw.randrange(1000, 40_000) for _ in range(128)] for _ in range(BATCH)]
        for each in (base, side):
            _round(each, heads, f"warm-{share}-", Random(0))
            each.step_seconds.clear()
            each.watch.seconds, each.watch.num_calls = 0.0, 0
        took: dict[int, list[float]] = {id(base): [], id(side): []}
        for number in range(num_rounds):
            for each in draw.sample((base, side), 2):
                started = time.perf_counter()
                _round(each, heads, f"{share}-{number}-", Random(number))
                took[id(each)].append(time.perf_counter() - started)
        _report(f"checksums of {share:.0%} of the blocks", took[id(base)], took[id(side)])
        inside = side.watch.seconds
        print(f"  inside the check: {inside / sum(took[id(side)]):.2%} of the time, {side.watch.num_calls} calls")
        assert side.engine.pool.cache.counters.checksum_failures == 0


def _round(side: Side, heads: Sequence[Sequence[int]], name: str, draw: Random) -> None:
    for number, head in enumerate(heads):
        tail = [draw.randrange(1000, 40_000) for _ in range(64)]
        side.add([*head, *tail], 16, f"{name}{number}")
    while side.engine.has_work:
        side.engine.step()


def _take_turns(sides: Sequence[Side], act: Callable[[Side], None], count: int, draw: Random) -> None:
    for _ in range(count):
        for side in draw.sample(list(sides), len(sides)):
            act(side)


def _report(name: str, without: Sequence[float], with_it: Sequence[float]) -> None:
    ratios = np.asarray(with_it) / np.asarray(without)
    rng = np.random.default_rng(0)
    samples = np.median(rng.choice(ratios, size=(2000, len(ratios))), axis=1)
    low, high = np.percentile(samples, (2.5, 97.5))
    print(f"{name}: median of {len(ratios)} paired ratios {np.median(ratios) - 1:+.2%}", end="")
    print(f" (95 % {low - 1:+.2%} to {high - 1:+.2%}); median without {1e3 * float(np.median(without)):.2f} ms")


def main() -> None:
    num_pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
    loaded = load_model(threads=1)
    measure_decode(loaded, num_pairs)
    measure_checksums(loaded, max(8, num_pairs // 30))


if __name__ == "__main__":
    main()
