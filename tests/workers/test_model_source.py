"""What can be asked for as a model, and how the answer reads when it cannot be had."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_builders import make_reference, make_row, make_runner, make_step, save_model

from workers.model.spec import UnsupportedModelError, spec_from_config
from workers.model_loader import load_runner
from workers.model_source import ModelSourceError, resolve_model
from workers.runner_config import RunnerConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "Tiny-Llama", make_reference("llama"))


def test_a_folder_is_named_after_itself_and_known_by_its_bytes(folder: Path, tmp_path: Path) -> None:
    source = resolve_model(str(folder))
    assert (source.name, source.gguf_file, source.path) == ("tiny-llama", None, folder)
    same = save_model(tmp_path / "copy", make_reference("llama"))
    other = save_model(tmp_path / "other", make_reference("llama", seed=1))
    assert resolve_model(str(same)).weights_digest == source.weights_digest
    assert resolve_model(str(other)).weights_digest != source.weights_digest


@pytest.mark.weights
def test_the_default_is_the_model_that_comes_with_the_installation() -> None:
    source = resolve_model()
    assert source.name == "smollm2-135m-instruct"
    assert source.gguf_file is not None
    assert json.loads((source.path / "config.json").read_text())["model_type"] == "llama"


def test_what_is_not_there_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")
    for spec, words in (
        (tmp_path / "absent.gguf", "no such GGUF file"),
        (tmp_path / "absent", "no such folder"),
        (tmp_path / "empty", "has no config.json"),
        (tmp_path / "file.txt", "neither a model folder nor a .gguf file"),
        (tmp_path / "weightless", "has no weights"),
    ):
        with pytest.raises(ModelSourceError, match=words):
            resolve_model(str(spec))


def test_a_hub_id_without_a_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelSourceError, match=r"'nobody/no-such-model'.*could not be fetched"):
        resolve_model("nobody/no-such-model")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHWORD_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(UnsupportedModelError, match="is not a GGUF file"):
        resolve_model(str(file))
    file.write_bytes(b"GGUF" + b"\0" * 64 + b"rope_freqs.weight")
    with pytest.raises(UnsupportedModelError, match="rope scaling by a tensor"):
        resolve_model(str(file))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "opt"}, "architecture 'opt'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantisation 'awq'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantisation 'gptq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantisation 'fp8'"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            "quantisation 'bitsandbytes'",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_parameters": None}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "rope scaling 'dynamic'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
    ],
)
def test_what_is_not_built_is_refused_by_name(folder: Path, changes: dict, words: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=words):
        make_runner(folder)


def test_shards_are_one_model_and_each_is_reported(tmp_path: Path) -> None:
    model = make_reference("llama")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    num_shards = len(list((tmp_path / "shards").glob("*.safetensors")))
    assert num_shards > 2
    seen: list[float] = []
    settings = RunnerConfig(dtype="float32", num_blocks=8, self_test=False, threads=1)
    whole = load_runner(replace(settings, model=str(tmp_path / "whole")))
    sharded = load_runner(
        replace(settings, model=str(tmp_path / "shards")),
        lambda what, fraction: seen.append(fraction) if what == "loading weights" else None,
    )
    assert seen == [pytest.approx(number / num_shards) for number in range(1, num_shards + 1)]
    step = make_step(make_row([5, 6, 7], 0, [3]))
    assert torch.equal(whole.compute_logits(step), sharded.compute_logits(step))


def test_missing_and_left_over_tensors_are_named(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    taken = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, file)
    with pytest.raises(UnsupportedModelError, match=r"lack 'model\.layers\.1\.mlp\.down_proj\.weight'"):
        make_runner(folder)
    tensors["model.layers.1.mlp.down_proj.weight"] = taken
    tensors["model.layers.1.mlp.extra.weight"] = taken.clone()
    save_file(tensors, file)
    with pytest.raises(UnsupportedModelError, match=r"no place for 1 tensors.*extra"):
        make_runner(folder)


def test_a_context_longer_than_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="max_model_len is 513, the model's context is 512"):
        make_runner(folder, max_model_len=513)


def test_spec_of_a_multimodal_wrapper_is_its_text_models() -> None:
    class Wrapper:
        text_config = make_reference("gemma3").config

    assert spec_from_config(Wrapper()) == spec_from_config(Wrapper.text_config)
