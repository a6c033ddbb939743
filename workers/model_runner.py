"""Runs steps on CPU: owns weights, KV pool and sampling. Knows nothing of requests, users or caching."""

from __future__ import annotations

import hashlib
import logging
import platform
import uuid
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Literal

import torch

from cache_service.block_key import ModelIdentity
from cluster.api.errors import NotFoundError
from workers.device import resolve_device
from workers.forward_model import AdaptableModel, ForwardModel
from workers.kv_cache import KVCache
from workers.kv_layout import plan_pool
from workers.model.batch import build_batch
from workers.model.lora import AdapterError, LoraAdapter, load_adapter
from workers.model.native_model import NativeModel, refuse_unsupported
from workers.model.spec import ModelSpec, spec_from_config
from workers.model.torch_model import TorchModel
from workers.model.weights import ModelWeights, load_weights
from workers.model_source import ModelSource, ProgressCallback, no_progress, resolve_model
from workers.native.build import NativeUnavailableError, build_ahead, supported_isas
from workers.runner_config import RunnerConfig
from workers.sampler import Sampler
from workers.self_test import SelfTestReport, felt_products, run_self_test
from workers.step import StepInput, StepOutput, StepRow, WindowGroup
from workers.windowed_kv_cache import WindowedKVCache

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class CpuModelRunner:
    """The ModelRunner of workers/step.py on CPU."""

    def __init__(
        self,
        config: RunnerConfig,
        model: ForwardModel,
        cache: KVCache,
        source: ModelSource,
        numerics: str,
        adapters: Sequence[LoraAdapter] = (),
    ) -> None:
        self._config, self._model, self._cache = config, model, cache
        self._adapter_digests = {adapter.name: adapter.digest for adapter in adapters}
        self._loaded_digests = set(self._adapter_digests.values())
        self.source = source
        self._numerics = numerics
        self._max_model_len = _max_model_len(config, model.spec)
        self._sampler = Sampler(model.spec.eos_token_ids)
        self._identity = ModelIdentity(
            model=source.name,
            weights_digest=source.weights_digest,
            dtype=str(model.dtype).removeprefix("torch."),
            kv_layout=model.kv_layout,
            block_size_tokens=config.block_size,
        )

    @property
    def model(self) -> ForwardModel:
        """The weights: another runner with a KV pool of its own may share them."""
        return self._model

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def window(self) -> WindowGroup | None:
        return self._cache.window

    @property
    def block_size(self) -> int:
        return self._config.block_size

    @property
    def vocab_size(self) -> int:
        return self._model.spec.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._model.spec.eos_token_ids

    @property
    def identity(self) -> ModelIdentity:
        return self._identity

    @property
    def numerics(self) -> str:
        return self._numerics

    @property
    def adapters(self) -> tuple[tuple[str, bytes], ...]:
        """(name, content digest) of what is loaded beside the base model."""
        return tuple(self._adapter_digests.items())

    def execute(self, step: StepInput) -> StepOutput:
        self._cache.copy(step.block_copies)
        self._cache.copy_pages(step.page_copies)
        if not step.rows:
            return StepOutput([])
        logits = iter(self.compute_logits(step).numpy())
        return StepOutput([self._sampler.sample(next(logits), row.samples) if row.samples else [] for row in step.rows])

    def compute_logits(self, step: StepInput) -> torch.Tensor:
        """The step without copies and sampling: float32 [rows that sample, vocab], valid until the next call."""
        self._resolve_adapters(step.rows)
        batch = build_batch(step.rows, self.block_size, self._config.layout, self._model.row_tile.pad)
        return self._model.forward(batch, self._cache)

    def _resolve_adapters(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            if row.adapter is not None and row.adapter_digest is None:
                row.adapter_digest = self.adapter_digest(row.adapter)
            assert row.adapter_digest is None or row.adapter_digest in self._loaded_digests

    def read_adapter(self, name: str, folder: Path) -> LoraAdapter:
        """On any thread; changes nothing. Raises AdapterError, naming the adapter and the reason."""
        if not isinstance(self._model, AdaptableModel):
            raise AdapterError(f"adapter {name!r}: {self._model.kernel} kernels compute no adapters")
        if name == self.source.name:
            raise AdapterError(f"adapter {name!r} has the model's own name")
        return load_adapter(name, folder, self._model.spec, self._model.dtype)

    def install_adapter(self, adapter: LoraAdapter) -> None:
        """Between two steps. Replaces what went by the name; rows that run with that go on with it.

        Raises AdapterError when a row of it would feel its neighbours on this machine.
        """
        assert isinstance(self._model, AdaptableModel)
        if adapter.digest not in self._loaded_digests:
            try:
                self._model.add_adapter(adapter)
            except torch.OutOfMemoryError:
                raise AdapterError(f"adapter {adapter.name!r}: the device has no memory left for it") from None
            self._loaded_digests.add(adapter.digest)
            felt = [] if not self._config.self_test else self._felt_products(adapter)
            if felt:
                self._model.drop_adapter(adapter.digest)
                self._loaded_digests.discard(adapter.digest)
                raise AdapterError(f"adapter {adapter.name!r}: rows would feel one another in {', '.join(felt)}")
        self._adapter_digests[adapter.name] = adapter.digest

    def remove_adapter(self, name: str) -> bool:
        """Between two steps. False: no adapter went by the name."""
        return self._adapter_digests.pop(name, None) is not None

    def release_adapters(self, in_use: Set[bytes]) -> None:
        for digest in self._loaded_digests - in_use - set(self._adapter_digests.values()):
            assert isinstance(self._model, AdaptableModel)
            self._model.drop_adapter(digest)
            self._loaded_digests.discard(digest)

    def _felt_products(self, adapter: LoraAdapter) -> list[str]:
        mark = adapter.digest.hex()
        products = {name: one for name, one in self._model.row_products().items() if mark in name}
        return felt_products(products, self._model, self._config.max_num_batched_tokens)

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        self._cache.fill(block_ids, value)

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        return self._cache.checksum(block_ids)

    def adapter_digest(self, adapter: str | None) -> bytes | None:
        if adapter is None:
            return None
        if adapter in self._adapter_digests:
            return self._adapter_digests[adapter]
        raise NotFoundError(f"no adapter is loaded under the name {adapter!r}", param="model", code="model_not_found")


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

        max_model_len = _max_model_len(config, spec)
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
    max_model_len = _max_model_len(config, spec)
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


def _max_model_len(config: RunnerConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise ValueError(f"max_model_len is {config.max_model_len}, the model's context is {spec.max_position} tokens")
    return config.max_model_len


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
