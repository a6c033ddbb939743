"""The self-test of workers/self_test.py on a device model: it deals in host tensors, so they travel back and forth."""

from __future__ import annotations

import torch

from workers.cuda.products import ProductMode, tiles_agree
from workers.cuda.triton_model import TritonModel
from workers.kv_cache import KVCache
from workers.model.batch import Batch
from workers.model.linear import Product


class HostView:
    """A ForwardModel whose cache and logits lie in host memory."""

    def __init__(self, model: TritonModel) -> None:
        self._model = model
        self.spec, self.kernel, self.dtype = model.spec, model.kernel, model.dtype
        self.kv_layout, self.row_tile = model.kv_layout, model.row_tile

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        return self._model.kv_block_shape(block_size)

    def row_products(self) -> dict[str, tuple[int, Product]]:
        return self._model.row_products()

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        blocks = cache.data.to(self._model.device)
        logits = self._model.run(self._model.place(batch, blocks.shape[-2]), list(blocks))
        cache.data.copy_(blocks)
        return logits.cpu()


def choose_tiles(model: TritonModel) -> None:
    """Keeps the wide tiles only if they give the narrow ones' bits for every product of the model, on this device."""
    mode: ProductMode = model.mode
    if not mode.fast:
        linears = [*model.layers[0].products().values(), model.lm_head]
        weights = [(linear.weight, linear.bias) for linear in linears]
        weights += [(weight, None) for weight in model.adapter_weights().values()]
        mode.use_wide = all(tiles_agree(weight, bias) for weight, bias in weights)
