"""Runs steps on CPU: owns weights, KV pool and sampling. Knows nothing of requests, users or caching."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from pathlib import Path

import torch

from cache_service.block_key import ModelIdentity
from cluster.api.errors import NotFoundError
from workers.forward_model import AdaptableModel, ForwardModel
from workers.kv_cache import KVCache
from workers.model.batch import build_batch
from workers.model.lora import AdapterError, LoraAdapter, load_adapter
from workers.model.spec import ModelSpec
from workers.model_source import ModelSource
from workers.runner_config import RunnerConfig
from workers.sampler import Sampler
from workers.self_test import felt_products
from workers.step import StepInput, StepOutput, StepRow, WindowGroup

logger = logging.getLogger(__name__)


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
        self._max_model_len = resolve_max_model_len(config, model.spec)
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


def resolve_max_model_len(config: RunnerConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise ValueError(f"max_model_len is {config.max_model_len}, the model's context is {spec.max_position} tokens")
    return config.max_model_len
