"""The seam between the runner and the ways to compute a step."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from workers.kv_cache import KVCache
from workers.model.batch import Batch
from workers.model.linear import Product, RowTile
from workers.model.lora import LoraAdapter
from workers.model.spec import ModelSpec


class ForwardModel(Protocol):
    """A way to compute a step. `kernel` and `kv_layout` name it and how it lays K and V out inside a block."""

    spec: ModelSpec
    dtype: torch.dtype
    kv_layout: str
    row_tile: RowTile

    @property
    def kernel(self) -> str: ...

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        """Of one block, all KV heads. Raises ValueError for a block size that it cannot lay out."""
        ...

    def row_products(self) -> dict[str, tuple[int, Product]]:
        """(input size, product) of every kind of product in a step: what the self-test looks at one by one."""
        ...

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Writes K and V in place; float32 logits [samples, vocab], valid until the calling thread's next call."""
        ...


@runtime_checkable
class AdaptableModel(Protocol):
    """A forward model that takes LoRA adapters while it runs."""

    def add_adapter(self, adapter: LoraAdapter) -> None: ...
    def drop_adapter(self, digest: bytes) -> None: ...
