"""The weights of a model as plain tensors, merged as the forward pass wants them. Knows nothing of kernels."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.model.gguf_folder import gguf_tensors
from workers.model.spec import ModelSpec, UnsupportedModelError
from workers.model_source import ModelSource, ProgressCallback, no_progress


@dataclass
class LayerWeights:
    """One layer. Products are [out, in]; norms [size]; None where the architecture has none."""

    input_norm: torch.Tensor
    qkv: torch.Tensor  # [q_size + 2 kv_size, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    out: torch.Tensor  # [hidden, q_size]
    out_bias: torch.Tensor | None
    after_attention_norm: torch.Tensor | None  # Gemma only
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]
    after_mlp_norm: torch.Tensor | None  # Gemma only


@dataclass
class ModelWeights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    lm_head: torch.Tensor  # [vocab, hidden]; the embedding itself where they are tied


def load_weights(
    source: ModelSource, config: Any, spec: ModelSpec, dtype: torch.dtype, progress: ProgressCallback = no_progress
) -> ModelWeights:
    """Reads and merges. Raises UnsupportedModelError when a tensor is missing or one is left over."""
    tensors = dict(_normalised(_read_tensors(source, config, dtype, progress)))
    weights = _take(tensors, spec, dtype)
    if tensors:
        raise UnsupportedModelError(f"the forward pass has no place for {len(tensors)} tensors: {sorted(tensors)[:3]}")
    return weights


def _read_tensors(
    source: ModelSource, config: Any, dtype: torch.dtype, progress: ProgressCallback
) -> dict[str, torch.Tensor]:
    if source.gguf_file is None:
        return _read_folder(source.path, progress)
    converted = source.path / f"weights-{str(dtype).removeprefix('torch.')}.safetensors"
    if not converted.is_file():
        progress("undoing the quantisation of the weights", 0.0)
        _write_atomically(gguf_tensors(source.gguf_file, config, dtype), converted)
        progress("undoing the quantisation of the weights", 1.0)
    return _read_safetensors([converted], progress)


def _read_folder(folder: Path, progress: ProgressCallback) -> dict[str, torch.Tensor]:
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        return _read_safetensors(shards, progress)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.bin")):
        tensors.update(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    return tensors


def _read_safetensors(files: list[Path], progress: ProgressCallback) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {}
    for index, file in enumerate(files):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                tensors[name] = shard.get_tensor(name)
        progress("loading weights", (index + 1) / len(files))
    return tensors


def _write_atomically(tensors: dict[str, torch.Tensor], target: Path) -> None:
    from safetensors.torch import save_file

    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".converting-")
    os.close(handle)
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, name)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _normalised(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Drops the prefixes that multimodal wrappers add, and buffers that are computed."""
    for name, tensor in tensors.items():
        if name.endswith("rotary_emb.inv_freq") or "vision_tower" in name or "multi_modal_projector" in name:
            continue
        name = name.replace("language_model.model.", "model.").replace("model.language_model.", "model.")
        yield name.removeprefix("language_model."), tensor


def _take(tensors: dict[str, torch.Tensor], spec: ModelSpec, dtype: torch.dtype) -> ModelWeights:
    def need(name: str) -> torch.Tensor:
        if name not in tensors:
            raise UnsupportedModelError(f"the weights lack {name!r}")
        return tensors.pop(name).to(dtype)

    def want(name: str) -> torch.Tensor | None:
        return need(name) if name in tensors else None

    embedding = need("model.embed_tokens.weight")
    layers = [_take_layer(f"model.layers.{index}.", need, want, spec) for index in range(spec.num_layers)]
    head = want("lm_head.weight")
    if head is None and not spec.tied_embeddings:
        raise UnsupportedModelError("the weights lack 'lm_head.weight' and the embeddings are not tied")
    if head is None or spec.tied_embeddings:
        head = embedding
    return ModelWeights(embedding=embedding, layers=layers, final_norm=need("model.norm.weight"), lm_head=head)


def _take_layer(prefix: str, need: Any, want: Any, spec: ModelSpec) -> LayerWeights:
    attention = prefix + "self_attn."
    biases = [want(f"{attention}{part}_proj.bias") for part in "qkv"]
    # Gemma keeps the Llama name for the norm after attention and has one of its own before the MLP.
    mlp_norm = "pre_feedforward_layernorm" if spec.has_sandwich_norm else "post_attention_layernorm"
    return LayerWeights(
        input_norm=need(prefix + "input_layernorm.weight"),
        qkv=torch.cat([need(f"{attention}{part}_proj.weight") for part in "qkv"]),
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        q_norm=need(attention + "q_norm.weight") if spec.has_qk_norm else None,
        k_norm=need(attention + "k_norm.weight") if spec.has_qk_norm else None,
        out=need(attention + "o_proj.weight"),
        out_bias=want(attention + "o_proj.bias"),
        after_attention_norm=need(prefix + "post_attention_layernorm.weight") if spec.has_sandwich_norm else None,
        mlp_norm=need(f"{prefix}{mlp_norm}.weight"),
        gate_up=torch.cat([need(f"{prefix}mlp.{part}_proj.weight") for part in ("gate", "up")]),
        down=need(prefix + "mlp.down_proj.weight"),
        after_mlp_norm=need(prefix + "post_feedforward_layernorm.weight") if spec.has_sandwich_norm else None,
    )
