"""The KV pool of a model some of whose layers see a sliding window: those keep pages, fewer than there are blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workers.kv_cache import KVCache
from workers.native.arena import huge_zeros
from workers.step import WindowGroup


class WindowedKVCache(KVCache):
    """`data` is [blocks of all layers, *block_shape], layer after layer: `num_blocks` of a full layer, the pages of one
    with a window. Ids from `window.first_id` on name pages."""

    def __init__(
        self,
        windows: Sequence[int | None],
        num_blocks: int,
        window: WindowGroup,
        block_shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks, self.window = num_blocks, window
        self._counts = [num_blocks if one is None else window.num_pages for one in windows]
        starts = np.cumsum([0, *self._counts])
        self.first_blocks = tuple(int(start) for start in starts[:-1])
        is_full = np.array([one is None for one in windows])
        self._full, self._windowed = starts[:-1][is_full], starts[:-1][~is_full]
        shape = torch.Size((int(starts[-1]), *block_shape))
        self.data = huge_zeros(shape.numel() * dtype.itemsize).view(dtype).view(shape)
        flat = self.data.view(shape[0], -1)
        assert flat.shape[1] * flat.element_size() % 8 == 0, "a block must be whole 64-bit words"
        self._words = flat.view(torch.uint8).numpy().view(np.uint64)
        generator = np.random.Generator(np.random.Philox(key=0x57617463))
        odd = generator.integers(0, 1 << 63, size=(len(windows), self._words.shape[1]), dtype=np.uint64)
        self._weights = odd << np.uint64(1) | np.uint64(1)

    def layer(self, index: int) -> torch.Tensor:
        first = self.first_blocks[index]
        return self.data[first : first + self._counts[index]]

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        if block_ids:
            self.data[np.concatenate([self._places(one) for one in block_ids])] = value

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.data[self._places(target)] = self.data[self._places(source)]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As `copy`, of pages by their own numbers."""
        assert self.window is not None
        first = self.window.first_id
        self.copy([(first + source, first + target) for source, target in pairs])

    def checksum(self, block_ids: Sequence[int]) -> list[int]:
        places = [self._places(one) for one in block_ids]
        return [int((self._words[where] * self._weights[: len(where)]).sum(dtype=np.uint64)) for where in places]

    def _places(self, block_id: int) -> np.ndarray:
        """Where in `data` a block, or a page, lies: one place a layer."""
        assert self.window is not None
        first_id = self.window.first_id
        return self._full + block_id if block_id < first_id else self._windowed + (block_id - first_id)
