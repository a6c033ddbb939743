"""LoRA adapters as PEFT saves them, and the same change merged into a transformers model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 12


def make_tensors(
    reference: Any, seed: int, modules: tuple[str, ...] = ALL_MODULES, layers: tuple[int, ...] = (0, 1)
) -> dict[str, torch.Tensor]:
    """Random factors, large enough to change greedy output."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in reference.state_dict().items():
        parts = name.split(".")
        if len(parts) < 5 or parts[-2] not in modules or parts[-1] != "weight" or int(parts[2]) not in layers:
            continue
        out_size, in_size = weight.shape
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, in_size, generator=generator) * 0.1
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_size, RANK, generator=generator) * 0.1
    assert tensors
    return tensors


def save_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def merge_into(reference: Any, tensors: dict[str, torch.Tensor], scale: float = ALPHA / RANK) -> Any:
    """Adds the adapter to the model's own weights: what `model + adapter` means."""
    weights = reference.state_dict()
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith(".lora_A.weight"):
                b = tensors[name.replace("lora_A", "lora_B")]
                target = name.removeprefix("base_model.model.").replace(".lora_A", "")
                weights[target] += scale * (b @ a)
    return reference
