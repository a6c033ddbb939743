"""A row's logits are the same bits alone or in company, in any row, chunking, placement and layout (torch.equal)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_builders import (
    chunked_logits,
    make_prompt,
    make_reference,
    make_row,
    make_runner,
    make_step,
    save_model,
    spread_tables,
)
from transformers import AutoConfig

from workers.model.native_model import NativeModel
from workers.model.weights import load_weights
from workers.model_loader import make_cache
from workers.model_runner import CpuModelRunner
from workers.native.build import Isa, supported_isas
from workers.runner_config import RunnerConfig
from workers.self_test import run_self_test
from workers.step import StepRow

LENGTH = 150  # three attention tiles, the last one ragged
CHUNKINGS = ((150,), (125, *(1,) * 25), (63, 1, 1, 85), (16, 17, 48, 69), (5, 128, 17))
KERNELS = (("native", "bfloat16"), ("torch", "float32"), ("torch", "bfloat16"))
NAMES = ("llama", "llama-odd-heads", "qwen3", "gemma3")


def load(folder: Path, name: str, kernel: str, dtype: str, layout: str = "packed") -> CpuModelRunner:
    save_model(folder / name, make_reference(name))
    return make_runner(folder / name, kernel=kernel, dtype=dtype, layout=layout, self_test=True)


CASES = [*((*kernel, name) for kernel in KERNELS for name in NAMES), ("torch", "float16", "llama")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuModelRunner:
    kernel, dtype, name = request.param
    return load(tmp_path_factory.mktemp(name), name, kernel, dtype)


@pytest.fixture
def runner(loaded: CpuModelRunner) -> CpuModelRunner:
    """With an empty cache: other tests leave poison in it."""
    loaded.fill_blocks(range(loaded.num_blocks), 0.0)
    return loaded


def neighbours(runner: CpuModelRunner) -> tuple[list[StepRow], list[StepRow]]:
    tables = spread_tables(4, 12, runner.num_blocks, seed=5)[1:]
    rows = [make_row(make_prompt(n, seed=n), 0, table) for n, table in zip((1, 9, 33), tables, strict=True)]
    return rows[:1], rows[1:]


def test_chunking_company_and_placement_leave_no_trace(runner: CpuModelRunner) -> None:
    prompt = make_prompt(LENGTH)
    [table] = spread_tables(1, 12, runner.num_blocks, seed=5)
    expected = chunked_logits(runner, prompt, list(range(12)), (LENGTH,))
    assert expected.isfinite().all()
    before, after = neighbours(runner)
    companies = (([], []), (before, after), ([], [*before, *after]), ([*after, *before], []), (after, []))
    for chunks, (left, right) in zip(CHUNKINGS, companies, strict=True):
        assert torch.equal(chunked_logits(runner, prompt, table, chunks), expected), chunks
        assert torch.equal(chunked_logits(runner, prompt, table, (100, 50), left, right), expected)
        assert torch.equal(chunked_logits(runner, prompt, table, (149, 1), left, right), expected)


def test_what_the_row_does_not_own_may_be_nan(runner: CpuModelRunner) -> None:
    """Free blocks and the tails of owned blocks hold poison; nothing of it is felt."""
    prompt = make_prompt(LENGTH)
    table = list(range(40, 52))
    runner.fill_blocks(range(runner.num_blocks), 0.0)
    expected = chunked_logits(runner, prompt, table, (LENGTH,))
    for poison in (float("nan"), 3e4):
        runner.fill_blocks(range(runner.num_blocks), poison)
        assert torch.equal(chunked_logits(runner, prompt, table, (70, 79, 1)), expected)


def test_poison_inside_the_context_is_felt(runner: CpuModelRunner) -> None:
    """The test above can fail: the same poison in a block that the row reads changes its logits."""
    prompt = make_prompt(LENGTH)
    table = list(range(40, 52))
    expected = chunked_logits(runner, prompt, table, (LENGTH,))
    runner.fill_blocks([table[8]], float("nan"))
    again = runner.compute_logits(make_step(make_row(prompt[-1:], LENGTH - 1, table)))[0]
    assert not torch.equal(again, expected)


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_padded_layout_gives_the_packed_bits(tmp_path: Path, kernel: str, dtype: str) -> None:
    packed = load(tmp_path, "llama", kernel, dtype)
    padded = load(tmp_path, "llama", kernel, dtype, layout="padded")
    prompt, table = make_prompt(LENGTH), list(range(40, 52))
    before, after = neighbours(packed)
    for chunks in ((LENGTH,), (100, 50), (149, 1)):
        logits = [chunked_logits(runner, prompt, table, chunks, before, after) for runner in (packed, padded)]
        assert torch.equal(*logits)


@pytest.mark.slow
@pytest.mark.parametrize("isa", supported_isas(), ids=lambda isa: isa.name)
def test_every_instruction_set_of_this_machine_is_right_and_bit_exact(tmp_path: Path, isa: Isa) -> None:
    reference = load(tmp_path, "llama", "torch", "bfloat16")
    spec = reference.model.spec
    weights = load_weights(reference.source, AutoConfig.from_pretrained(reference.source.path), spec, torch.bfloat16)
    model = NativeModel(spec, weights, spec.max_position, isa)
    report = run_self_test(model, 16, 256, 16)
    assert report.is_bit_exact, report.failures
    config = RunnerConfig(num_blocks=96)
    native = CpuModelRunner(config, model, make_cache(config, model), reference.source, "")
    prompt, table = make_prompt(LENGTH), list(range(12))
    logits = [chunked_logits(runner, prompt, table, (LENGTH,)) for runner in (reference, native)]
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[0].abs().max()
