"""Tiny models on the GPU path. Without a GPU the kernels are interpreted: right, but a thousand times slower."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

# The choice is made when a kernel is defined, so it must precede the first import of one.
os.environ.setdefault("TRITON_INTERPRET", "1")


def require_triton() -> None:
    """Skips the calling module where the kernels can be neither compiled nor interpreted."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (it exists for Linux on x86-64)", allow_module_level=True)


require_triton()

import torch  # noqa: E402
from model_builders import make_reference, save_model  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from workers.cuda.decode import DecodeSteps  # noqa: E402
from workers.cuda.kv_cache import make_pool  # noqa: E402
from workers.cuda.model_runner import CudaModelRunner  # noqa: E402
from workers.cuda.products import ProductMode  # noqa: E402
from workers.cuda.triton_model import TritonModel  # noqa: E402
from workers.kv_cache import KVCache  # noqa: E402
from workers.kv_layout import plan_pool  # noqa: E402
from workers.model.lora import load_adapter  # noqa: E402
from workers.model.spec import spec_from_config  # noqa: E402
from workers.model.weights import load_weights  # noqa: E402
from workers.model_source import resolve_model  # noqa: E402
from workers.runner_config import RunnerConfig  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1" else "cpu")
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}


def make_triton_runner(
    tmp_path: Path, name: str = "llama", dtype: str = "float32", *, with_decode: bool = False, **changes: Any
) -> CudaModelRunner:
    """As `make_cuda_runner`, on whatever device there is; captured steps are replayed by computing them again."""
    folder = save_model(tmp_path / name, make_reference(name, **{**SMALL, **changes.pop("shape", {})}))
    settings = {"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 64, **changes}
    config = RunnerConfig(model=str(folder), device="cpu", dtype=dtype, **settings)
    source = resolve_model(str(folder))
    hf_config = AutoConfig.from_pretrained(folder)
    spec = spec_from_config(hf_config)
    torch_dtype = getattr(torch, dtype)
    weights = load_weights(source, hf_config, spec, torch_dtype)
    adapters = [load_adapter(adapter, Path(where), spec, torch_dtype) for adapter, where in config.adapters]
    # The interpreter multiplies in numpy, whose two tile shapes do not agree: as on a device where they do not.
    model = TritonModel(spec, weights, 256, DEVICE, ProductMode(use_wide=False), adapters)
    cache = make_cache(config, model)
    blocks_per_row = 256 // config.block_size
    decode = DecodeSteps(model, cache, 4, blocks_per_row, lambda compute: compute) if with_decode else None
    return CudaModelRunner(config, model, cache, source, "interpreted", adapters, decode)


def make_cache(config: RunnerConfig, model: TritonModel) -> KVCache:
    """As `make_device_cache` for a given number of blocks."""
    shape = model.kv_block_shape(config.block_size)
    windows = [layer.window for layer in model.spec.layers]
    plan = plan_pool(config, windows, torch.Size(shape).numel() * model.dtype.itemsize, None)
    return make_pool(plan, windows, shape, model.dtype, DEVICE)
