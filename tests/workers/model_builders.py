"""Tiny random models of every architecture, saved as folders, and greedy decoding through a runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from cluster.api.sampling import SamplingParams
from workers.model_loader import load_runner
from workers.model_runner import CpuModelRunner
from workers.runner_config import RunnerConfig
from workers.step import SampleInput, StepInput, StepRow

VOCAB = 199  # no multiple of anything: padding must show
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 32,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # logits far enough apart for greedy decoding to mean something
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-untied-bias": ("Llama", {"tie_word_embeddings": False, "attention_bias": True}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-rope-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-odd-heads": (
        "Llama",
        {"hidden_size": 84, "head_dim": 48, "num_attention_heads": 7, "num_key_value_heads": 1},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 21}),
    "gemma3": ("Gemma3", {"sliding_window": 21, "query_pre_attn_scalar": 24, "pad_token_id": 0}),
}


def make_reference(name: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model in float32."""
    kind, special = ARCHITECTURES[name]
    text = "Text" if kind == "Gemma3" else ""
    config_class = getattr(transformers, f"{kind}{text}Config")
    shape = {**_SHAPE, **special, **changes}
    if kind == "Qwen2":
        shape.pop("head_dim")  # it has none of its own: 96 / 6
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config_class(**shape)).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            torch.nn.init.normal_(parameter, mean=float(kind != "Gemma3"), std=0.2)
    model.generation_config.pad_token_id = 0
    return model


def save_model(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    return folder


def make_runner(folder: Path | str | None, **changes: Any) -> CpuModelRunner:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "num_blocks": 96,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "self_test": False,
        "threads": 1,
    }
    model = None if folder is None else str(folder)
    return load_runner(RunnerConfig(model=model, **{**settings, **changes}))


def greedy_sample(**changes: Any) -> SampleInput:
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, **changes)
    return SampleInput(params=params, choice=0, position=0, prompt_token_ids=(), output_token_ids=())


def make_row(token_ids: Sequence[int], start: int, table: Sequence[int], *, samples: bool = True) -> StepRow:
    sampled = (greedy_sample(),) if samples else ()
    return StepRow(seq_id=0, start=start, token_ids=token_ids, block_table=table, samples=sampled)


def make_step(*rows: StepRow) -> StepInput:
    return StepInput(step_id=0, rows=list(rows))


def make_prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


def chunked_logits(
    runner: CpuModelRunner,
    prompt: Sequence[int],
    table: Sequence[int],
    chunks: Sequence[int],
    before: Sequence[StepRow] = (),
    after: Sequence[StepRow] = (),
) -> torch.Tensor:
    """The last token's logits [vocab], the prompt cut into chunks, the last of them between `before` and `after`."""
    assert sum(chunks) == len(prompt)
    start = 0
    for chunk in chunks:
        row = make_row(prompt[start : start + chunk], start, table)
        is_last = start + chunk == len(prompt)
        rows = [*before, row, *after] if is_last else [row]
        logits = runner.compute_logits(make_step(*rows))
        start += chunk
    return logits[len(before)].clone()


def generate_together(
    runner: CpuModelRunner, prompts: list[list[int]], tables: list[list[int]], count: int, first_chunk: int
) -> list[list[int]]:
    """Greedy continuations; all prompts but the first enter one step late, and each prefill comes in two chunks."""
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    step = 0
    while any(len(output) < count for output in outputs):
        rows, owners = [], []
        for index, prompt in enumerate(prompts):
            known = [*prompt, *outputs[index]]
            if index > step or len(outputs[index]) >= count:
                continue
            end = len(known) if done[index] else min(first_chunk, len(prompt))
            rows.append(make_row(known[done[index] : end], done[index], tables[index], samples=end == len(known)))
            owners.append(index)
            done[index] = end
        for index, sampled in zip(owners, runner.execute(make_step(*rows)).sampled, strict=True):
            outputs[index] += [one.token_id for one in sampled]
        step += 1
    return outputs


def spread_tables(num_rows: int, blocks_per_row: int, num_blocks: int, seed: int = 3) -> list[list[int]]:
    """Block tables that are a random permutation of the pool."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[row * blocks_per_row : (row + 1) * blocks_per_row] for row in range(num_rows)]
