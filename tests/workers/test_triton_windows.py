"""Layers with a sliding window on the GPU path, interpreted: what they give back is missed by nobody."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from triton_builders import DEVICE, SMALL, make_triton_runner, require_triton

require_triton()

import pytest  # noqa: E402
import torch  # noqa: E402
from engine_builders import make_request, run_all  # noqa: E402
from fake_runner import SECRET, WindowedFakeRunner  # noqa: E402
from model_builders import make_prompt, make_reference, make_row, make_step  # noqa: E402
from test_engine_bit_exact import Recorder  # noqa: E402
from test_sliding_window import PassesTooSoon, WindowedCompany  # noqa: E402

from cache_service.block_key import BlockKeyer  # noqa: E402
from cluster.api.request import Request  # noqa: E402
from workers.build import EngineParts, build_engine  # noqa: E402
from workers.config import EngineConfig, IsolationCheck  # noqa: E402
from workers.cuda.kv_cache import WindowedDeviceKVCache  # noqa: E402
from workers.cuda.load import plan_that_fits  # noqa: E402
from workers.cuda.measure import WINDOW as DEVICE_WINDOW  # noqa: E402
from workers.cuda.measure import WINDOW_SIZES, make_spec, random_weights  # noqa: E402
from workers.cuda.model_runner import CudaModelRunner  # noqa: E402
from workers.cuda.products import ProductMode  # noqa: E402
from workers.cuda.triton_model import TritonModel  # noqa: E402
from workers.cuda.window_check import (  # noqa: E402
    TrialSizes,
    answers_of,
    compare_windows,
    count_events,
    engine_config,
    make_requests,
)
from workers.engine import LLMEngine  # noqa: E402
from workers.isolation_check import ViolationKind  # noqa: E402
from workers.layout_audit import audit_layout  # noqa: E402
from workers.runner_config import RunnerConfig  # noqa: E402
from workers.step import StepInput, StepRow, WindowGroup  # noqa: E402

pytestmark = pytest.mark.timeout(900)  # interpreted

SIZE, WINDOW, NUM_BLOCKS = 4, 9, 24
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": WINDOW, "num_hidden_layers": 1},
}


def make_runner(folder: Path, name: str, dtype: str, fraction: float = 0.5, **changes: Any) -> CudaModelRunner:
    settings = {"block_size": SIZE, "num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 16, **changes}
    return make_triton_runner(
        folder, name, dtype, with_decode=True, shape=SHAPES[name], window_fraction=fraction, **settings
    )


def make_windowed_engine(runner: CudaModelRunner, parts: EngineParts | None = None, **changes: Any) -> LLMEngine:
    config = EngineConfig(
        num_blocks=runner.num_blocks, max_model_len=32, block_size=SIZE, max_num_seqs=4, max_num_batched_tokens=8,
        isolation_check=IsolationCheck.POISON, max_pinned_fraction=0.0,
    )  # fmt: skip
    return build_engine(replace(config, **changes), runner, BlockKeyer(SECRET, runner.identity), parts)


def theirs(name: str, request: Request) -> list[int]:
    prompt = list(request.prompt_token_ids)
    out = make_reference(name, **{**SMALL, **SHAPES[name]}).generate(
        torch.tensor([prompt]), max_new_tokens=request.sampling.max_tokens, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


# --- bits


class Pages:
    """Pages of one row, taken and given back by hand, so that the same few serve again and again."""

    def __init__(self, runner: CudaModelRunner, free: list[int]) -> None:
        self.runner, self.free, self.start = runner, free, 0
        self.held: list[int] = []

    def row(self, token_ids: list[int], start: int, table: list[int]) -> StepRow:
        """The row, its pages extended to hold it; what went before it is given back and overwritten with NaN."""
        first = max(0, start - WINDOW + 1) // SIZE
        self.give_back(first - self.start)
        while (self.start + len(self.held)) * SIZE < start + len(token_ids):
            self.held.append(self.free.pop(0))
        return replace(make_row(token_ids, start, table), window_start=self.start, window_pages=list(self.held))

    def give_back(self, count: int) -> None:
        passed, self.held = self.held[:count], self.held[count:]
        self.start += count
        self.free += passed
        self.runner.fill_blocks([self.runner.num_blocks + page for page in passed], math.nan)


@pytest.mark.parametrize(("name", "dtype"), [("gemma3", "float32"), ("mistral", "float16")])
def test_a_row_over_pages_has_the_bits_of_a_row_over_all_blocks(tmp_path: Path, name: str, dtype: str) -> None:
    """Chunks, company, pages used again and poisoned between, and the captured decode step."""
    runner, keeping = (make_runner(tmp_path, name, dtype, fraction) for fraction in (0.5, 1.0))
    assert runner.window is not None
    assert keeping.window is None
    prompt, table = make_prompt(22), [7, 2, 19, 4, 11, 0]
    expected = keeping.compute_logits(make_step(make_row(prompt, 0, table)))[0].clone()
    runner.fill_blocks(range(runner.num_blocks + 1, runner.num_blocks + runner.window.num_pages), math.nan)
    mine, other = Pages(runner, [6, 3, 9, 1, 12]), Pages(runner, [10])
    company = other.row(make_prompt(1, seed=6), 0, [21])
    for start, end in ((0, 8), (8, 15), (15, 21)):
        runner.compute_logits(make_step(company, mine.row(prompt[start:end], start, table)))
    decoded = runner.compute_logits(make_step(company, mine.row(prompt[21:], 21, table)))[1].clone()
    assert torch.equal(decoded, expected)
    assert len(mine.held) < len(table), "void: no page was given back"
    runner.fill_blocks([runner.num_blocks + mine.held[0]], math.nan)
    again = runner.compute_logits(make_step(company, mine.row(prompt[21:], 21, table)))[1]
    assert not torch.equal(again, expected), "a page of the window, taken too early, is felt"


def test_padding_of_a_bucket_writes_no_page(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "mistral", "float32")
    ids = range(NUM_BLOCKS + runner.window.num_pages)
    before = runner.checksum_blocks(ids)
    rows = [replace(make_row([5 + i], 0, [i + 1]), window_pages=[i + 3]) for i in range(3)]
    runner.execute(make_step(*rows))  # three rows in the bucket of four
    after = runner.checksum_blocks(ids)
    written = [number for number, old, new in zip(ids, before, after, strict=True) if old != new]
    assert written == [NUM_BLOCKS + page for page in (3, 4, 5)]


def test_copies_of_a_step_reach_blocks_and_pages(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "gemma3", "float32")
    runner.fill_blocks([1], 2.0)
    runner.fill_blocks([NUM_BLOCKS + 3], 7.0)
    ids = [1, 9, NUM_BLOCKS + 3, NUM_BLOCKS + 5]
    block, other_block, page, other_page = runner.checksum_blocks(ids)
    assert (other_block, other_page) == (0, 0)
    runner.execute(StepInput(0, [], block_copies=[(1, 9)], page_copies=[(3, 5)]))
    assert runner.checksum_blocks(ids) == [block, block, page, page]
    assert block != page


# --- in the engine


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_tokens_are_those_of_transformers_while_windows_close(tmp_path: Path, name: str) -> None:
    """There are blocks for both prompts but not for both answers: who is preempted begins anew, on other pages."""
    engine = make_windowed_engine(make_runner(tmp_path, name, "float32", num_blocks=9, max_num_batched_tokens=8))
    keyer = BlockKeyer(SECRET, engine.runner.identity)
    requests = [
        make_request(make_prompt(14, seed), num_tokens, keyer=keyer, user=f"user-{seed}", ignore_eos=True)
        for seed, num_tokens in enumerate((6, 4))
    ]
    transcript = run_all(engine, *requests)
    assert [transcript.of(request) for request in requests] == [theirs(name, request) for request in requests]
    assert engine.violations == []
    assert max(engine.pool.pages.lives) > 1, "void: no page was used again"
    assert engine.scheduler.num_preemptions, "void: nobody was preempted"


def test_a_page_taken_too_early_is_named_or_changes_the_tokens(tmp_path: Path) -> None:
    """The test above can fail."""
    runner = make_runner(tmp_path, "mistral", "float32")
    outcomes = []
    for check in (IsolationCheck.CHECK, IsolationCheck.OFF):
        engine = make_windowed_engine(runner, EngineParts(publisher=PassesTooSoon), isolation_check=check)
        request = make_request(make_prompt(14), 1, keyer=BlockKeyer(SECRET, runner.identity), ignore_eos=True)
        got = run_all(engine, request).of(request)
        outcomes.append((got == theirs("mistral", request), {violation.kind for violation in engine.violations}))
    assert outcomes == [(False, {ViolationKind.TABLE}), (False, set())]


# --- memory


def windowed_pool(windows: tuple[int | None, ...]) -> WindowedDeviceKVCache:
    return WindowedDeviceKVCache(windows, 6, WindowGroup(9, 4, 6), (2, 1, SIZE, 16), torch.float32, DEVICE)


def contents(pool: WindowedDeviceKVCache, num_layers: int) -> list[list[float]]:
    """The first number of each block or page, layer by layer."""
    return [pool.layer(index).flatten(1)[:, 0].tolist() for index in range(num_layers)]


def test_blocks_and_pages_are_filled_copied_and_summed_apart() -> None:
    pool = windowed_pool((9, None, 9))
    pool.fill([1, 6 + 2], 5.0)
    assert contents(pool, 3) == [[0, 0, 5, 0], [0, 5, 0, 0, 0, 0], [0, 0, 5, 0]]
    pool.copy([(1, 3), (3, 4)])
    pool.copy_pages([(2, 1)])
    assert contents(pool, 3) == [[0, 5, 5, 0], [0, 5, 0, 5, 5, 0], [0, 5, 5, 0]]
    ids = [9, 0, 7, 5, 1]
    before = pool.checksum(ids)
    assert before == [pool.checksum([one])[0] for one in ids]
    assert before[:2] == [0, 0]
    pool.layer(2)[3, 1, 0, 2, 7] = 1e-30  # one number in page 3
    assert [old == new for old, new in zip(before, pool.checksum(ids), strict=True)] == [False, True, True, True, True]
    all_windowed = windowed_pool((9, 9))
    all_windowed.fill([1, 6 + 3], 2.0)
    assert contents(all_windowed, 2) == [[0, 0, 0, 2]] * 2
    assert all_windowed.checksum([1]) == [0]


@pytest.mark.parametrize(("fraction", "num_blocks", "num_pages"), [(1.0, 100, None), (0.5, 170, 86), (0.25, 264, 67)])
def test_what_is_free_becomes_blocks_of_both_kinds(fraction: float, num_blocks: int, num_pages: int | None) -> None:
    """Five layers with a window and one without, 10 bytes a block and layer: 6,000 bytes are for the pool."""
    config = RunnerConfig(gpu_memory_fraction=0.5, window_fraction=fraction, max_num_batched_tokens=64)
    windows = (512,) * 5 + (None,)
    plan = plan_that_fits(config, windows, free_bytes=12_600, step_bytes=600, layer_block_bytes=10)
    assert (plan.num_blocks, plan.window and plan.window.num_pages) == (num_blocks, num_pages)
    assert 5_900 < plan.num_bytes(windows, 10) <= 6_000
    as_many = replace(config, num_blocks=num_blocks)
    assert plan_that_fits(as_many, windows, 6_600, 600, 10) == plan
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}, but of 6500 free bytes"):
        plan_that_fits(as_many, windows, 6_500, 600, 10)


def test_the_sizes_for_devices_try_what_they_should() -> None:
    """The scheduler does not know who computes: what happens here happens there."""
    sizes = WINDOW_SIZES
    runner = WindowedFakeRunner(
        DEVICE_WINDOW, sizes.num_blocks // 2 + 1, sizes.num_blocks, block_size=sizes.block_size,
        max_model_len=sizes.max_model_len,
    )  # fmt: skip
    keyer = BlockKeyer(SECRET, runner.identity)
    engine = build_engine(engine_config(sizes, IsolationCheck.POISON), runner, keyer)
    answers_of(engine, make_requests(sizes, keyer, runner.vocab_size))
    assert all(count_events(engine).values()), count_events(engine)
    assert engine.violations == []


# --- the long form

NEEDED = ("shared steps", "chunk splits", "preemptions", "evictions", "page evictions", "aborts", "prefix hits")


class GpuCompany(WindowedCompany):
    """Short requests over small blocks, for a step takes the interpreter a fifth of a second."""

    def __init__(self, runner: CudaModelRunner, keeping: CudaModelRunner, seed: int, poison: float) -> None:
        super().__init__(runner, keeping, seed, poison)
        self.config = replace(
            self.config, num_blocks=runner.num_blocks, max_model_len=64, block_size=SIZE, max_num_seqs=4,
            max_num_batched_tokens=16, max_shared_chunk_tokens=7,
        )  # fmt: skip

    def request(self) -> Request:
        draw = self.random
        num_stem = draw.choice([8, 12, 16, 20]) + draw.choice([-1, 0, 1])
        return make_request(
            [*draw.choice(self.stems)[:num_stem], draw.randrange(self.runner.vocab_size)],
            draw.randrange(3, 20),
            user=draw.choice(["alice", "bob"]),
            keyer=self.keyer,
            n=draw.choice([1, 1, 1, 2]),
            temperature=draw.choice([0.0, 0.8]),
            seed=draw.getrandbits(63),
            top_k=draw.choice([0, 5]),
            logprobs=draw.choice([1, 3]),
            ignore_eos=True,
        )

    def note(self, engine: LLMEngine, recorder: Recorder) -> None:
        super().note(engine, recorder)
        self.seen["prefix hits"] += sum(num_cached > 0 for num_cached in recorder.cached.values())


@pytest.fixture
def company(tmp_path: Path, request: pytest.FixtureRequest) -> GpuCompany:
    name, dtype, poison = request.param
    runner, keeping = (make_runner(tmp_path, name, dtype, fraction, num_blocks=16) for fraction in (0.5, 1.0))
    return GpuCompany(runner, keeping, seed=5, poison=poison)


CASES = [
    ("gemma3", "float32", math.nan), ("gemma3", "float16", 3e4),
    ("mistral", "float32", 3e4), ("mistral", "float16", math.nan),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("company", CASES, indirect=True)
def test_forgetting_changes_no_bit(company: GpuCompany) -> None:
    requests, recorder = company.run(20)
    assert [name for name in NEEDED if not company.seen[name]] == [], f"void: {dict(company.seen)}"
    assert company.differences(requests, recorder) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("company", CASES[3:], indirect=True)
def test_one_wrong_page_changes_bits(company: GpuCompany) -> None:
    class WrongPageOnce:
        def __init__(self, inner: CudaModelRunner) -> None:
            self.inner, self.num_wrong = inner, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def execute(self, step: Any) -> Any:
            rows = [row for row in step.rows if row.start >= 16]
            if rows and not self.num_wrong:
                self.num_wrong += 1
                rows[0].window_pages = [rows[0].window_pages[1], *rows[0].window_pages[1:]]
            return self.inner.execute(step)

    faulty = WrongPageOnce(company.runner)
    company.runner = faulty
    requests, recorder = company.run(6)
    company.runner = faulty.inner
    assert faulty.num_wrong == 1
    assert company.differences(requests, recorder) != []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_check_for_devices_passes_and_can_fail() -> None:
    spec = make_spec(32, 48, 2, 2, 1, 16, 97)
    spec = replace(spec, layers=(replace(spec.layers[0], window=WINDOW), spec.layers[1]))
    weights = random_weights(spec, "cpu", torch.float32)
    model = TritonModel(spec, weights, 64, DEVICE, ProductMode(use_wide=False))
    sizes = TrialSizes(((14, 8), (12, 10), (16, 7), (10, 10)), 9, SIZE, max_num_batched_tokens=8, max_num_seqs=3)
    found = compare_windows(model, sizes, lambda compute: compute)
    assert found["ok"], found
    found = compare_windows(model, sizes, lambda compute: compute, EngineParts(publisher=PassesTooSoon))
    assert not found["ok"]
    assert found["different"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_layout_audit_finds_nothing_to_say(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "gemma3", "float32", num_blocks=40, max_num_batched_tokens=48)
    assert runner.window is not None
    engine = make_windowed_engine(runner, max_num_batched_tokens=48)
    found = audit_layout(engine)
    assert (found.num_comparisons, found.position_faults, found.mask_faults, found.not_done) == (6, (), (), None)
    assert engine.pool.pages.num_held == 0
