"""LoRA: right (as if merged), bit-exact in company, and named by its content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import ALL_MODULES, make_tensors, merge_into, save_adapter
from model_builders import greedy_sample, make_prompt, make_reference, make_runner, make_step, save_model, spread_tables

from cluster.api.errors import NotFoundError
from workers.model.lora import AdapterError
from workers.model.spec import UnsupportedModelError
from workers.model_runner import CpuModelRunner
from workers.native.build import NativeUnavailableError
from workers.step import StepRow

LENGTH, NEW_TOKENS = 70, 16
SOME_MODULES = ("q_proj", "v_proj")


def make_base(name: str) -> Any:
    """Gemma's large embedding, tied, would repeat the last token whatever the layers add."""
    return make_reference(name, tie_word_embeddings=False)


def load(tmp_path: Path, name: str = "llama", **changes: object) -> CpuModelRunner:
    """The model with two adapters: `poet` on all modules, `clerk` on q and v of the second layer alone."""
    reference = make_base(name)
    folder = save_model(tmp_path / "model", reference)
    adapters = (
        ("poet", save_adapter(tmp_path / "poet", make_tensors(reference, 1))),
        ("clerk", save_adapter(tmp_path / "clerk", make_tensors(reference, 2, SOME_MODULES, (1,)))),
    )
    return make_runner(folder, adapters=adapters, **changes)


def row(prompt: list[int], start: int, table: list[int], adapter: str | None) -> StepRow:
    return StepRow(0, start, prompt, table, (greedy_sample(),), adapter)


def greedy(runner: CpuModelRunner, prompt: list[int], table: list[int], adapter: str | None) -> list[int]:
    out: list[int] = []
    start, chunk = 0, prompt
    for _ in range(NEW_TOKENS):
        step = make_step(row(chunk, start, table, adapter))
        start += len(chunk)
        chunk = [runner.execute(step).sampled[0][0].token_id]
        out += chunk
    return out


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_an_adapter_equals_its_merged_weights(tmp_path: Path, name: str) -> None:
    runner = load(tmp_path, name)
    prompt = make_prompt(LENGTH)
    outputs = []
    for adapter, tensors in (
        ("poet", make_tensors(make_base(name), 1)),
        ("clerk", make_tensors(make_base(name), 2, SOME_MODULES, (1,))),
        (None, {}),
    ):
        merged = merge_into(make_base(name), tensors)
        out = merged.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        outputs.append(greedy(runner, prompt, list(range(8)), adapter))
        assert outputs[-1] == out[0, LENGTH:].tolist(), adapter
    assert len({tuple(output) for output in outputs}) == 3, "adapters that change nothing prove nothing"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_base_and_two_adapters_in_one_batch_have_the_bits_of_solitude(tmp_path: Path, dtype: str, layout: str) -> None:
    runner = load(tmp_path, dtype=dtype, layout=layout, self_test=True, kernel="torch")
    assert not runner.numerics.startswith("inexact")
    names = (None, "poet", "clerk", "poet", None)
    prompts = [make_prompt(length, seed=length) for length in (70, 33, 65, 1, 17)]
    tables = spread_tables(5, 6, runner.num_blocks)
    rows = [row(*given) for given in zip(prompts, [0] * 5, tables, names, strict=True)]
    alone = [runner.compute_logits(make_step(one))[0].clone() for one in rows]
    assert len({tuple(logits.argsort(descending=True)[:5].tolist()) for logits in alone}) > 1
    for order in ((0, 1, 2, 3, 4), (4, 2, 0, 3, 1)):
        together = runner.compute_logits(make_step(*(rows[index] for index in order)))
        for place, index in enumerate(order):
            assert torch.equal(together[place], alone[index]), (names[index], order)
    # In chunks, the second of them among the others.
    first, second = (
        replace(rows[1], token_ids=prompts[1][:20], samples=()),
        replace(rows[1], token_ids=prompts[1][20:], start=20),
    )
    runner.compute_logits(make_step(rows[0], first))
    assert torch.equal(runner.compute_logits(make_step(rows[2], second, rows[0]))[1], alone[1])


def test_base_rows_are_those_of_a_runner_without_adapters(tmp_path: Path) -> None:
    runner = load(tmp_path)
    bare = make_runner(tmp_path / "model")
    step = make_step(row(make_prompt(LENGTH), 0, list(range(8)), None))
    assert torch.equal(runner.compute_logits(step), bare.compute_logits(step))


def test_the_digest_names_the_content(tmp_path: Path) -> None:
    runner = load(tmp_path)
    digests = dict(runner.adapters)
    assert set(digests) == {"poet", "clerk"}
    assert len(set(digests.values())) == 2
    assert runner.adapter_digest("poet") == digests["poet"]
    assert runner.adapter_digest(None) is None
    again = load(tmp_path)
    assert again.adapters == runner.adapters
    save_adapter(tmp_path / "poet", make_tensors(make_reference("llama"), 3))
    adapters = tuple((name, str(tmp_path / name)) for name in digests)
    reloaded = make_runner(tmp_path / "model", adapters=adapters)
    assert reloaded.adapter_digest("poet") != digests["poet"]
    assert reloaded.adapter_digest("clerk") == digests["clerk"]


def test_an_unknown_adapter_is_named(tmp_path: Path) -> None:
    runner = load(tmp_path)
    with pytest.raises(NotFoundError, match="nobody"):
        runner.adapter_digest("nobody")
    with pytest.raises(NotFoundError, match="nobody"):
        runner.execute(make_step(row([5], 0, [0], "nobody")))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, config: dict, said: str) -> None:
    reference = make_reference("llama")
    folder = save_model(tmp_path / "model", reference)
    adapter = save_adapter(tmp_path / "a", make_tensors(reference, 1), **config)
    with pytest.raises(AdapterError, match=said):
        make_runner(folder, adapters=(("a", adapter),))


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    reference = make_reference("llama")
    folder = save_model(tmp_path / "model", reference)
    good = make_tensors(reference, 1)
    name = next(iter(good))
    cases = {
        "embed_tokens": {**good, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 199)},
        "layers.7": {**good, name.replace("layers.0", "layers.7"): good[name].clone()},
        "has shapes": {**good, name: torch.zeros(4, 95)},
        "only lora_B": {key: tensor for key, tensor in good.items() if key != name},
    }
    for said, tensors in cases.items():
        with pytest.raises(AdapterError, match=said):
            make_runner(folder, adapters=(("a", save_adapter(tmp_path / "a", tensors)),))
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        make_runner(folder, adapters=(("a", str(tmp_path)),))
    assert issubclass(AdapterError, UnsupportedModelError)


def test_names_must_tell_models_apart(tmp_path: Path) -> None:
    reference = make_reference("llama")
    folder = save_model(tmp_path / "model", reference)
    adapter = save_adapter(tmp_path / "a", make_tensors(reference, 1, ALL_MODULES))
    with pytest.raises(ValueError, match="'a' 2 times"):
        make_runner(folder, adapters=(("a", adapter), ("a", adapter)))
    with pytest.raises(ValueError, match="model's own name"):
        make_runner(folder, adapters=(("model", adapter),))


def test_the_kernels_say_that_they_compute_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match="adapters"):
        load(tmp_path, kernel="native", dtype="bfloat16")
