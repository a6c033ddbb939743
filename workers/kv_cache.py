"""The pool of KV blocks as bytes: filling, copying, checksums. A block's inner layout is the kernel's affair."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workers.native.arena import huge_zeros
from workers.step import WindowGroup


class KVCache:
    """`data` is [layers, blocks, *block_shape]; a block holds the K and V of `block_size` tokens of all KV heads.

    `first_blocks` says where each layer's blocks begin, in blocks from the start of `data`.
    """

    window: WindowGroup | None = None

    def __init__(self, num_layers: int, num_blocks: int, block_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.num_blocks = num_blocks
        self.first_blocks = tuple(layer * num_blocks for layer in range(num_layers))
        shape = torch.Size((num_layers, num_blocks, *block_shape))
        self.data = huge_zeros(shape.numel() * dtype.itemsize).view(dtype).view(shape)
        flat = self.data.view(num_layers, num_blocks, -1)
        assert flat.shape[2] * flat.element_size() % 8 == 0, "a block must be whole 64-bit words"
        # numpy knows no bfloat16, and the checksum wants bits anyway.
        self._words = flat.view(torch.uint8).numpy().view(np.uint64)
        generator = np.random.Generator(np.random.Philox(key=0x57617463))
        weights = generator.integers(0, 1 << 63, size=(num_layers, self._words.shape[2]), dtype=np.uint64)
        self._weights = weights << np.uint64(1) | np.uint64(1)

    def layer(self, index: int) -> torch.Tensor:
        """[blocks, *block_shape]"""
        return self.data[index]

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        if block_ids:
            self.data[:, list(block_ids)] = value

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target) pairs, in order: a block may be copied on."""
        for source, target in pairs:
            self.data[:, target] = self.data[:, source]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert not pairs, "a pool without pages"

    def checksum(self, block_ids: Sequence[int]) -> list[int]:
        """A sum of the block's words, each times an odd number of its own: no change of one word can go unseen."""
        return [int((self._words[:, block] * self._weights).sum(dtype=np.uint64)) for block in block_ids]
