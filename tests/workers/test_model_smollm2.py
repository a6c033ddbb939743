"""SmolLM2-135M-Instruct against transformers: token for token in float32; in bfloat16 differing only at near ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_builders import generate_together, make_runner, spread_tables
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from workers.model.gguf_folder import gguf_tensors
from workers.model_runner import CpuModelRunner
from workers.model_source import resolve_model

pytestmark = pytest.mark.weights

NEW_TOKENS = 20
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from 7 to 12.",
    "Explain in a few words why the sky is blue, and then name three colours that it never has. " * 3,
)


@pytest.fixture(scope="module")
def load_reference() -> Callable[[torch.dtype], Any]:
    source = resolve_model()
    assert source.gguf_file is not None
    config = AutoConfig.from_pretrained(source.path)
    tensors = gguf_tensors(source.gguf_file, config, torch.float32)

    def load(dtype: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_config(config)
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
        model.tie_weights()
        return model.to(dtype).eval()

    return load


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


def test_float32_is_token_exact(load_reference: Callable[[torch.dtype], Any], prompts: list[list[int]]) -> None:
    reference = load_reference(torch.float32)
    runner = make_runner(None, kernel="torch", self_test=True)
    assert ours(runner, prompts) == [theirs(reference, prompt) for prompt in prompts]


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_bfloat16_differs_only_where_the_reference_is_unsure(
    kernel: str, load_reference: Callable[[torch.dtype], Any], prompts: list[list[int]]
) -> None:
    reference, exact = load_reference(torch.bfloat16), load_reference(torch.float32)
    outputs = ours(make_runner(None, dtype="bfloat16", kernel=kernel), prompts)
    agreed = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = theirs(reference, prompt)
        same = next((i for i in range(NEW_TOKENS) if output[i] != expected[i]), NEW_TOKENS)
        agreed += same
        if same == NEW_TOKENS:
            continue
        prefix = torch.tensor([[*prompt, *expected[:same]]])
        with torch.inference_mode():
            rounded, full = (model(prefix).logits[0, -1].float() for model in (reference, exact))
        # The gap of the float32 reference: the bfloat16 one's logits lie on a grid as wide as the gap itself.
        first, second = full.topk(2).values.tolist()
        assert first - second < (rounded - full).abs().max().item(), f"differs at {same} without a near tie"
    assert agreed >= NEW_TOKENS, "nothing in common: the rule would allow anything"
