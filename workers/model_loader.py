"""Finds, loads and tests a model, and puts the runner together."""

from __future__ import annotations

import hashlib
import logging
import platform
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from workers.device import resolve_device
from workers.forward_model import ForwardModel
from workers.kv_cache import KVCache
from workers.kv_layout import plan_pool
from workers.model.lora import LoraAdapter, load_adapter
from workers.model.native_model import NativeModel, refuse_unsupported
from workers.model.spec import ModelSpec, spec_from_config
from workers.model.torch_model import TorchModel
from workers.model.weights import ModelWeights, load_weights
from workers.model_runner import CpuModelRunner, resolve_max_model_len
from workers.model_source import ModelSource, ProgressCallback, no_progress, resolve_model
from workers.native.build import NativeUnavailableError, build_ahead, supported_isas
from workers.runner_config import RunnerConfig
from workers.self_test import SelfTestReport, run_self_test
from workers.windowed_kv_cache import WindowedKVCache

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_runner(config: RunnerConfig, progress: ProgressCallback = no_progress) -> CpuModelRunner:
    """Finds, loads and tests the model. Raises ModelSourceError, UnsupportedModelError or ValueError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.kernel != "torch" and config.dtype in ("auto", "bfloat16") and config.device != "cuda":
        build_ahead()
    source = resolve_model(config.model, progress)
    hf_config = _read_config(source)
    spec = spec_from_config(hf_config)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    weights = load_weights(source, hf_config, spec, dtype, progress)
    adapters = _load_adapters(config, source, spec, dtype)
    if device == "cuda":
        from workers.cuda.load import make_cuda_runner  # needs triton

        max_model_len = resolve_max_model_len(config, spec)
        runner: CpuModelRunner = make_cuda_runner(config, spec, weights, source, max_model_len, adapters, progress)
    else:
        runner = _make_cpu_runner(config, spec, weights, source, adapters, progress)
    progress("ready", 1.0)
    return runner


def _make_cpu_runner(
    config: RunnerConfig,
    spec: ModelSpec,
    weights: ModelWeights,
    source: ModelSource,
    adapters: Sequence[LoraAdapter],
    progress: ProgressCallback,
) -> CpuModelRunner:
    model = make_model(config, spec, weights, progress, adapters)
    report = _test(config, model, progress)
    numerics = _numerics_digest(model, report)
    return CpuModelRunner(config, model, make_cache(config, model), source, numerics, adapters)


def _load_adapters(config: RunnerConfig, source: ModelSource, spec: ModelSpec, dtype: torch.dtype) -> list[LoraAdapter]:
    for name, _ in config.adapters:
        if name == source.name:
            raise ValueError(f"adapters names {name!r}, which is the model's own name")
    return [load_adapter(name, Path(folder).expanduser(), spec, dtype) for name, folder in config.adapters]


def _test(config: RunnerConfig, model: ForwardModel, progress: ProgressCallback) -> SelfTestReport | None:
    if not config.self_test:
        return None
    progress("testing that no row feels another", 0.0)
    report = run_self_test(
        model, config.block_size, config.max_num_batched_tokens, config.max_num_seqs, may_tile=config.row_padding
    )
    progress("testing that no row feels another", 1.0)
    return report


def make_model(
    config: RunnerConfig,
    spec: ModelSpec,
    weights: ModelWeights,
    progress: ProgressCallback = no_progress,
    adapters: Sequence[LoraAdapter] = (),
) -> ForwardModel:
    """The kernels where they can be had, else torch. Raises NativeUnavailableError when `kernel` insists on them."""
    max_model_len = resolve_max_model_len(config, spec)
    if config.kernel != "torch":
        try:
            refuse_unsupported(spec, weights.embedding.dtype, config.block_size)
            if adapters or config.may_load_adapters:
                raise NativeUnavailableError("the kernels compute no adapters")
            progress("compiling kernels", 0.0)
            return NativeModel(spec, weights, max_model_len, supported_isas()[0])
        except NativeUnavailableError as error:
            if config.kernel == "native":
                raise
            logger.warning("no kernels, torch computes instead: %s", error)
    return TorchModel(spec, weights, max_model_len, adapters)


def make_cache(config: RunnerConfig, model: ForwardModel) -> KVCache:
    """Sizes the pool. Raises ValueError when the bytes do not hold one block."""
    shape = model.kv_block_shape(config.block_size)
    windows = [layer.window for layer in model.spec.layers]
    budget = None if config.num_blocks is not None else config.kv_cache_bytes
    plan = plan_pool(config, windows, torch.Size(shape).numel() * model.dtype.itemsize, budget)
    if plan.window is None:
        return KVCache(model.spec.num_layers, plan.num_blocks, shape, model.dtype)
    return WindowedKVCache(windows, plan.num_blocks, plan.window, shape, model.dtype)


def resolve_dtype(name: str, device: Literal["cpu", "cuda"] = "cpu") -> torch.dtype:
    """`auto` is bfloat16 where the device multiplies it; else float32, on a GPU float16."""
    if name != "auto":
        return _DTYPES[name]
    if device == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def _read_config(source: ModelSource) -> object:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source.path, local_files_only=True)


def _numerics_digest(model: ForwardModel, report: SelfTestReport | None) -> str:
    """Equal on two workers exactly when each may go on with the other's streams: a request names its adapter's content,
    so that is not part of it."""
    if report is None or not report.is_bit_exact:
        return f"inexact-{uuid.uuid4().hex}"  # equal to nobody's
    facts = (
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        torch.__version__,
        str(torch.get_num_threads()),
        str(model.dtype),
        model.kernel,
        model.kv_layout,
        str(report.row_tile),
        report.step_digest,
    )
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=16).hexdigest()
