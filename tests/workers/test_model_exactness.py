"""In float32, greedy output equals transformers' token for token: paged, permuted, chunked and batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_builders import (
    ARCHITECTURES,
    generate_together,
    make_prompt,
    make_reference,
    make_runner,
    save_model,
    spread_tables,
)

NEW_TOKENS = 24
LENGTHS = (1, 15, 16, 17, 40)


def reference_continuation(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    # Without a mask, generate takes the prompt's own end-of-turn tokens for padding.
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_transformers(tmp_path: Path, name: str) -> None:
    reference = make_reference(name)
    runner = make_runner(save_model(tmp_path / "model", reference))
    prompts = [make_prompt(length, seed=length) for length in LENGTHS]
    tables = spread_tables(len(prompts), 5, runner.num_blocks)
    outputs = generate_together(runner, prompts, tables, NEW_TOKENS, first_chunk=11)
    assert outputs == [reference_continuation(reference, prompt) for prompt in prompts]
    assert len({tuple(output) for output in outputs}) == len(outputs), "a model that says the same to all proves little"


def test_a_wrong_position_would_be_seen(tmp_path: Path) -> None:
    """The test above can fail: the same prompt one place further on continues otherwise."""
    reference = make_reference("llama")
    runner = make_runner(save_model(tmp_path / "model", reference))
    prompt = make_prompt(40)
    expected = reference_continuation(reference, prompt)
    [shifted] = generate_together(runner, [prompt[1:]], [list(range(5))], NEW_TOKENS, first_chunk=11)
    assert shifted != expected
