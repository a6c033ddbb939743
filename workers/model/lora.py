"""LoRA adapters from PEFT folders, merged per product as the forward pass wants them. Knows nothing of batches."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.model.spec import ModelSpec, UnsupportedModelError
from workers.model_source import digest_files

# product of the forward pass -> the model's own modules that it merges, in this order
_PRODUCT_PARTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_TENSOR = re.compile(r"\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.\w+)?\.weight$")
# What changes the result in a way that is not computed here, with the value that leaves it off.
_NOT_COMPUTED: dict[str, Any] = {
    "use_dora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "modules_to_save": None,
    "alpha_pattern": {},
    "layer_replication": None,
}


class AdapterError(UnsupportedModelError):
    """The adapter cannot be read or does not fit the model; the message names adapter and reason."""


@dataclass(frozen=True)
class LoraPair:
    """Adds b · (a · x) to a product's output; the scaling is part of `b`."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]


@dataclass(frozen=True)
class LoraAdapter:
    """`layers[i]` maps a product's name (qkv, out, gate_up, down) to what is added to it."""

    name: str
    digest: bytes  # SHA-256 over configuration and weights
    layers: tuple[Mapping[str, LoraPair], ...]


def load_adapter(name: str, folder: Path, spec: ModelSpec, dtype: torch.dtype) -> LoraAdapter:
    """Reads adapter_config.json and adapter_model.safetensors. Raises AdapterError."""
    files = [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
    for file in files:
        if not file.is_file():
            raise AdapterError(f"adapter {name!r}: {folder} has no {file.name}")
    digest = digest_files(files)
    config = _read_config(name, files[0])
    _refuse_unsupported(name, config)
    found = _read_tensors(name, files[1], spec)
    if digest_files(files) != digest:
        raise AdapterError(f"adapter {name!r}: its files were changed while they were read")
    numerator = float(config["lora_alpha"])
    layers = []
    for index in range(spec.num_layers):
        parts = {module: pair for (layer, module), pair in found.items() if layer == index}
        scaled = {module: _scale(pair, numerator, config) for module, pair in parts.items()}
        layers.append(_merge(name, scaled, spec, dtype))
    return LoraAdapter(name, digest, tuple(layers))


def _read_config(name: str, file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AdapterError(f"adapter {name!r}: {file.name} is not valid JSON") from error
    if not isinstance(config, dict) or not isinstance(config.get("lora_alpha"), int | float):
        raise AdapterError(f"adapter {name!r}: {file.name} has no number lora_alpha")
    return config


def _refuse_unsupported(name: str, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"adapter {name!r}: kind {kind!r} is not supported, LORA is")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"adapter {name!r}: bias={config['bias']!r} is not supported")
    for field, off in _NOT_COMPUTED.items():
        value = config.get(field, off)
        if value and value != off:
            raise AdapterError(f"adapter {name!r}: {field}={value!r} is not supported")


def _read_tensors(name: str, file: Path, spec: ModelSpec) -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]:
    """(layer, module) -> (A, B), checked against the model's shapes."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    halves: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    sizes = _module_sizes(spec)
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"adapter {name!r}: {file.name} cannot be read as safetensors") from error
    for key, tensor in tensors.items():
        match = _TENSOR.search(key)
        if match is None or match[2] not in sizes or int(match[1]) >= spec.num_layers:
            raise AdapterError(f"adapter {name!r}: the forward pass has no place for the tensor {key!r}")
        halves.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor.float()
    if not halves:
        raise AdapterError(f"adapter {name!r}: {file.name} holds no tensors")
    for (layer, module), pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise AdapterError(f"adapter {name!r}: layer {layer} {module} has only lora_{next(iter(pair))}")
        out_size, in_size = sizes[module]
        shapes = (tuple(pair["A"].shape), tuple(pair["B"].shape))
        rank = pair["A"].shape[0]
        if shapes != ((rank, in_size), (out_size, rank)):
            wanted = f"({rank}, {in_size}) and ({out_size}, {rank})"
            raise AdapterError(
                f"adapter {name!r}: layer {layer} {module} has shapes {shapes}, the model needs {wanted}"
            )
    return {place: (pair["A"], pair["B"]) for place, pair in halves.items()}


def _module_sizes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Module -> (out, in)."""
    hidden, middle = spec.hidden_size, spec.intermediate_size
    return {
        "q_proj": (spec.q_size, hidden),
        "k_proj": (spec.kv_size, hidden),
        "v_proj": (spec.kv_size, hidden),
        "o_proj": (hidden, spec.q_size),
        "gate_proj": (middle, hidden),
        "up_proj": (middle, hidden),
        "down_proj": (hidden, middle),
    }


def _scale(pair: tuple[torch.Tensor, torch.Tensor], alpha: float, config: dict[str, Any]) -> LoraPair:
    a, b = pair
    rank = a.shape[0]
    return LoraPair(a, b * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)))


def _merge(name: str, modules: dict[str, LoraPair], spec: ModelSpec, dtype: torch.dtype) -> Mapping[str, LoraPair]:
    """One pair per merged product: the As on top of one another, the Bs along a diagonal."""
    sizes = _module_sizes(spec)
    merged = {}
    for product, parts in _PRODUCT_PARTS.items():
        present = [(part, modules[part]) for part in parts if part in modules]
        if not present:
            continue
        columns = sum(pair.a.shape[0] for _, pair in present)
        b = torch.zeros(sum(sizes[part][0] for part in parts), columns)
        row = column = 0
        for part in parts:
            if part in modules:
                pair = modules[part]
                b[row : row + sizes[part][0], column : column + pair.a.shape[0]] = pair.b
                column += pair.a.shape[0]
            row += sizes[part][0]
        a = torch.cat([pair.a for _, pair in present])
        merged[product] = LoraPair(a.to(dtype).contiguous(), b.to(dtype).contiguous())
        if not bool(merged[product].b.isfinite().all() and merged[product].a.isfinite().all()):
            raise AdapterError(f"adapter {name!r}: {product} is not finite in {str(dtype).removeprefix('torch.')}")
    return merged
