"""The whole GPU path, interpreted: tokens as transformers says, bits that do not depend on company, draws on device."""

from __future__ import annotations

from pathlib import Path

from triton_builders import SMALL, make_triton_runner, require_triton

require_triton()

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from lora_builders import make_tensors, merge_into, save_adapter  # noqa: E402
from model_builders import (  # noqa: E402
    VOCAB,
    generate_together,
    greedy_sample,
    make_prompt,
    make_reference,
    make_row,
    make_step,
)

from workers.step import StepRow  # noqa: E402

pytestmark = pytest.mark.timeout(900)  # interpreted

NEW_TOKENS = 4


# Gemma 3 and Mistral also run in test_triton_windows.py, each time.
SLOW = (pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3", "mistral", "gemma3"))


@pytest.mark.parametrize("name", ["qwen2", *SLOW])
def test_greedy_equals_transformers(tmp_path: Path, name: str) -> None:
    runner = make_triton_runner(tmp_path, name, with_decode=True)
    reference = make_reference(name, **SMALL)
    prompts = [make_prompt(length, seed=length) for length in (3, 26)]
    outputs = generate_together(runner, prompts, [[7], [5, 2, 11]], NEW_TOKENS, first_chunk=9)
    for prompt, output in zip(prompts, outputs, strict=True):
        out = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        assert output == out[0, len(prompt) :].tolist()
    logits = runner.compute_logits(make_step(make_row(prompts[1], 0, [4, 3])))[0].cpu()
    assert (logits - reference(torch.tensor([prompts[1]])).logits[0, -1]).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_row_has_the_bits_of_solitude(tmp_path: Path, dtype: str) -> None:
    """Chunks, neighbours, other blocks, poisoned memory, and the captured decode step."""
    runner = make_triton_runner(tmp_path, "qwen3", dtype, with_decode=True)
    prompt = make_prompt(20)
    runner.fill_blocks(range(runner.num_blocks), float("nan"))
    expected = runner.compute_logits(make_step(make_row(prompt, 0, [3, 1])))[0].clone()
    assert expected.isfinite().all()
    runner.fill_blocks(range(runner.num_blocks), 3e4)
    others = [make_row(make_prompt(5, seed=5), 0, [9]), make_row(make_prompt(1, seed=6), 0, [4])]
    first, last = make_row(prompt[:19], 0, [8, 2], samples=False), make_row(prompt[19:], 19, [8, 2])
    runner.compute_logits(make_step(others[0], first))
    alone = runner.compute_logits(make_step(last))[0].clone()
    decoding = runner.compute_logits(make_step(others[1], last))[1].clone()  # two decode rows: bucket 2
    mixed = runner.compute_logits(make_step(others[0], last, others[1]))[1]
    for logits in (alone, decoding, mixed):
        assert torch.equal(logits, expected)
    runner.fill_blocks([8], float("nan"))
    assert not torch.equal(runner.compute_logits(make_step(last))[0], expected), "poison inside the context is felt"


def test_padding_of_a_bucket_writes_nothing(tmp_path: Path) -> None:
    runner = make_triton_runner(tmp_path, with_decode=True)
    before = runner.checksum_blocks(range(24))
    runner.execute(make_step(*(make_row([5 + index], 0, [index + 1]) for index in range(3))))  # bucket 4
    after = runner.checksum_blocks(range(24))
    assert [old != new for old, new in zip(before, after, strict=True)] == [0 < block < 4 for block in range(24)]


def test_base_and_adapters_in_one_batch(tmp_path: Path) -> None:
    reference = make_reference("llama", **SMALL)
    tensors = [make_tensors(reference, seed) for seed in (1, 2)]
    adapters = tuple(
        (name, save_adapter(tmp_path / name, one)) for name, one in zip(("poet", "clerk"), tensors, strict=True)
    )
    runner = make_triton_runner(tmp_path, with_decode=True, adapters=adapters)
    prompt = make_prompt(6)
    rows = [
        StepRow(0, 0, prompt, [block], (greedy_sample(),), name)
        for block, name in enumerate((None, "poet", "clerk"), start=1)
    ]
    together = runner.compute_logits(make_step(*rows)).clone()
    for index, row in enumerate(rows):
        assert torch.equal(runner.compute_logits(make_step(row))[0], together[index])
    for index, change in enumerate(({}, *tensors)):
        merged = merge_into(make_reference("llama", **SMALL), change)
        expected = merged(torch.tensor([prompt])).logits[0, -1]
        assert (together[index] - expected).abs().max() < 1e-4
    assert (together[0] - together[1]).abs().max() > 0.1


def test_host_and_device_draws_come_back_in_order(tmp_path: Path) -> None:
    """Rows that ask for log probabilities are drawn on the host, the others on the device, each in its place."""
    runner = make_triton_runner(tmp_path)
    rows = [
        StepRow(0, 0, [5], [1], (greedy_sample(),)),
        make_row([6, 7], 0, [2], samples=False),
        StepRow(0, 0, [8], [3], (greedy_sample(logprobs=2), greedy_sample())),
        StepRow(0, 0, [9], [4], (greedy_sample(),)),
    ]
    sampled = runner.execute(make_step(*rows)).sampled
    assert [len(draws) for draws in sampled] == [1, 0, 2, 1]
    for row, draws in zip(rows, sampled, strict=True):
        if row.samples:
            logits = runner.compute_logits(make_step(row))[0]
            assert {draw.token_id for draw in draws} == {int(np.argmax(logits.cpu().numpy()))}
    assert sampled[2][0].logprob is not None
    assert len(sampled[2][0].top) == 2
    assert sampled[0][0].logprob is None
    assert max(draw.token_id for draws in sampled for draw in draws) < VOCAB
