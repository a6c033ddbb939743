"""The pool of KV blocks in device memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workers.kv_cache import KVCache


class DeviceKVCache(KVCache):
    """As its base, but nothing ever leaves the device. Raises torch.OutOfMemoryError when it does not fit."""

    def __init__(
        self, num_layers: int, num_blocks: int, block_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.data = torch.zeros(num_layers, num_blocks, *block_shape, dtype=dtype, device=device)
        flat = self.data.view(num_layers, num_blocks, -1)
        assert flat.shape[2] * flat.element_size() % 8 == 0, "a block must be whole 64-bit words"
        self._device_words = flat.view(torch.int64)
        generator = np.random.Generator(np.random.Philox(key=0x57617463))
        odd = generator.integers(0, 1 << 62, size=(num_layers, self._device_words.shape[2]), dtype=np.int64) << 1 | 1
        self._device_weights = torch.from_numpy(odd).to(device)

    def checksum(self, block_ids: Sequence[int]) -> list[int]:
        """A sum of the block's words, each times an odd number of its own, modulo 2⁶⁴."""
        sums = [(self._device_words[:, block] * self._device_weights).sum() for block in block_ids]
        return [value & 0xFFFFFFFFFFFFFFFF for value in torch.stack(sums).tolist()] if sums else []
