"""SmolLM2-135M-Instruct against transformers: token for token in float32; in bfloat16 differing only at near ties."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from model_builders import generate_together, make_runner, spread_tables
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from workers.model.gguf_folder import gguf_tensors
from workers.model_runner import CpuModelRunner
from workers.model_source import resolve_model

pytestmark = [pytest.mark.weights, pytest.mark.timeout(900)]  # half a minute of arithmetic, on an idle machine

NEW_TOKENS = 20
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from 7 to 12.",
    "Explain in a few words why the sky is blue, and then name three colours that it never has. " * 3,
)


@pytest.fixture(scope="module")
def references() -> dict[torch.dtype, Any]:
    """The transformers model, in float32 and rounded to bfloat16."""
    source = resolve_model()
    assert source.gguf_file is not None
    config = AutoConfig.from_pretrained(source.path)
    model = AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict(gguf_tensors(source.gguf_file, config, torch.float32), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    model.tie_weights()
    return {torch.float32: model.eval(), torch.bfloat16: deepcopy(model).to(torch.bfloat16).eval()}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model().path)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


def ours(runner: CpuModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    tables = spread_tables(len(prompts), 10, runner.num_blocks)
    return generate_together(runner, prompts, tables, NEW_TOKENS, first_chunk=33)


def theirs(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    # Without a mask, generate takes the prompt's own end-of-turn tokens for padding.
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def test_float32_is_token_exact(references: dict[torch.dtype, Any], prompts: list[list[int]]) -> None:
    runner = make_runner(None, kernel="torch")
    assert ours(runner, prompts) == [theirs(references[torch.float32], prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def rounded_answers(references: dict[torch.dtype, Any], prompts: list[list[int]]) -> list[list[int]]:
    return [theirs(references[torch.bfloat16], prompt) for prompt in prompts]


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_bfloat16_differs_only_where_the_reference_is_unsure(
    kernel: str,
    references: dict[torch.dtype, Any],
    prompts: list[list[int]],
    rounded_answers: list[list[int]],
) -> None:
    outputs = ours(make_runner(None, dtype="bfloat16", kernel=kernel), prompts)
    agreed = 0
    for prompt, output, expected in zip(prompts, outputs, rounded_answers, strict=True):
        same = next((i for i in range(NEW_TOKENS) if output[i] != expected[i]), NEW_TOKENS)
        agreed += same
        if same == NEW_TOKENS:
            continue
        prefix = torch.tensor([[*prompt, *expected[:same]]])
        with torch.inference_mode():
            rounded, full = (
                references[dtype](prefix).logits[0, -1].float() for dtype in (torch.bfloat16, torch.float32)
            )
        # The gap of the float32 reference: the bfloat16 one's logits lie on a grid as wide as the gap itself.
        first, second = full.topk(2).values.tolist()
        assert first - second < (rounded - full).abs().max().item(), f"differs at {same} without a near tie"
    assert agreed >= NEW_TOKENS, "nothing in common: the rule would allow anything"
