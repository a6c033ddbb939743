"""Puts the GPU runner together: weights, tiles, self-test, KV pool from what memory is left, captured decode steps."""

from __future__ import annotations

import hashlib
import logging
import platform
import uuid
from collections.abc import Sequence

import numpy as np
import torch
import triton

from workers.attention.triton_paged import check_shape
from workers.cuda.decode import DecodeSteps, capture_graph
from workers.cuda.kv_cache import DeviceKVCache, make_pool
from workers.cuda.model_runner import CudaModelRunner
from workers.cuda.products import ProductMode
from workers.cuda.self_test import HostView, choose_tiles
from workers.cuda.triton_model import TritonModel
from workers.kv_cache import KVCache
from workers.kv_layout import PoolPlan, plan_pool
from workers.model.batch import Batch, build_batch
from workers.model.lora import LoraAdapter
from workers.model.spec import ModelSpec, UnsupportedModelError
from workers.model.weights import ModelWeights
from workers.model_source import ModelSource, ProgressCallback
from workers.runner_config import RunnerConfig
from workers.self_test import SelfTestReport, run_self_test
from workers.step import StepRow

logger = logging.getLogger(__name__)


def make_cuda_runner(
    config: RunnerConfig,
    spec: ModelSpec,
    weights: ModelWeights,
    source: ModelSource,
    max_model_len: int,
    adapters: Sequence[LoraAdapter],
    progress: ProgressCallback,
) -> CudaModelRunner:
    """Raises UnsupportedModelError or ValueError when model and memory do not fit."""
    device = torch.device("cuda", torch.cuda.current_device())
    progress("moving weights to the device", 0.0)
    mode = ProductMode(fast=not config.batch_invariant)
    model = TritonModel(spec, weights, max_model_len, device, mode, adapters)
    try:
        check_shape(model.shape(config.block_size))
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    choose_tiles(model)
    report = test_model(config, model, progress)
    cache = make_device_cache(config, model)
    progress("capturing decode steps", 0.0)
    blocks_per_row = -(-max_model_len // config.block_size)
    decode: DecodeSteps | None = None
    try:
        decode = DecodeSteps(model, cache, config.max_num_seqs, blocks_per_row, capture_graph)
    except torch.OutOfMemoryError:
        logger.warning("no memory is left to capture decode steps: they are launched kernel by kernel")
        torch.cuda.empty_cache()
    return CudaModelRunner(config, model, cache, source, device_numerics(model, report), adapters, decode)


def test_model(config: RunnerConfig, model: TritonModel, progress: ProgressCallback) -> SelfTestReport | None:
    if not config.self_test or model.mode.fast:
        return None
    progress("testing that no row feels another", 0.0)
    return run_self_test(
        HostView(model), config.block_size, config.max_num_batched_tokens, config.max_num_seqs, may_tile=False
    )


def make_device_cache(config: RunnerConfig, model: TritonModel) -> KVCache:
    """Sized so that the largest step still fits: a full pool is answered by admission, never by a failed step."""
    shape = model.kv_block_shape(config.block_size)
    windows = [layer.window for layer in model.spec.layers]
    peak = measure_largest_step(config, model)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    plan = plan_that_fits(config, windows, free, peak, torch.Size(shape).numel() * model.dtype.itemsize)
    return make_pool(plan, windows, shape, model.dtype, model.device)


def plan_that_fits(
    config: RunnerConfig, windows: Sequence[int | None], free_bytes: int, step_bytes: int, layer_block_bytes: int
) -> PoolPlan:
    """As `plan_pool`, of what is left on a device.

    Raises ValueError, naming the figures, when what is asked for does not fit beside the largest step.
    """
    left, budget = free_bytes - step_bytes, None
    if config.num_blocks is not None:
        setting = f"num_blocks is {config.num_blocks}"
    elif config.gpu_memory_fraction is not None:
        setting, budget = f"gpu_memory_fraction is {config.gpu_memory_fraction}", int(left * config.gpu_memory_fraction)
    else:
        setting, budget = f"kv_cache_bytes is {config.kv_cache_bytes}", config.kv_cache_bytes
    block_bytes = len(windows) * layer_block_bytes
    if budget is None or budget >= block_bytes:
        plan = plan_pool(config, windows, layer_block_bytes, budget)
        if plan.num_bytes(windows, layer_block_bytes) <= left:
            return plan
    raise ValueError(
        f"{setting}, but of {free_bytes} free bytes on the device the largest step takes {step_bytes} and one KV "
        f"block {block_bytes}; a smaller model or fewer max_num_batched_tokens leave more"
    )


def measure_largest_step(config: RunnerConfig, model: TritonModel) -> int:
    """Bytes that the largest step takes for its own results, by doing one that writes nowhere."""
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    shape = model.kv_block_shape(config.block_size)
    cache = DeviceKVCache(model.spec.num_layers, 1, shape, model.dtype, model.device)
    model.forward(largest_batch(config), cache)
    return torch.cuda.max_memory_allocated(model.device) - before


def largest_batch(config: RunnerConfig) -> Batch:
    """All tokens are padding, and as many rows sample as may."""
    row = StepRow(seq_id=0, start=0, token_ids=(0,), block_table=(0,))
    batch = build_batch([row], config.block_size, "packed", lambda _: config.max_num_batched_tokens)
    batch.slot_blocks.fill(-1)
    batch.sample_tokens = np.zeros(config.max_num_seqs, dtype=np.int32)
    return batch


def device_numerics(model: TritonModel, report: SelfTestReport | None) -> str:
    """Equal on two workers exactly when each may go on with the other's streams."""
    if report is None or not report.is_bit_exact:
        return f"inexact-{uuid.uuid4().hex}"  # equal to nobody's
    facts = (
        platform.machine(), torch.cuda.get_device_name(model.device),
        str(torch.cuda.get_device_capability(model.device)), torch.__version__, triton.__version__,
        str(model.dtype), model.kernel, model.kv_layout, report.step_digest,
    )  # fmt: skip
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=16).hexdigest()
