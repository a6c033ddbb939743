"""The pool of KV blocks in device memory, or two where some layers see a sliding window and keep fewer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workers.kv_cache import KVCache
from workers.kv_layout import PoolPlan
from workers.step import WindowGroup


class DeviceKVCache(KVCache):
    """As its base, but nothing ever leaves the device. Raises torch.OutOfMemoryError when it does not fit."""

    def __init__(
        self, num_layers: int, num_blocks: int, block_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.data = torch.zeros(num_layers, num_blocks, *block_shape, dtype=dtype, device=device)
        num_words, rest = divmod(torch.Size(block_shape).numel() * dtype.itemsize, 8)
        assert rest == 0, "a block must be whole 64-bit words"
        self._device_words = self.data.flatten(2).view(torch.int64)
        generator = np.random.Generator(np.random.Philox(key=0x57617463))
        odd = generator.integers(0, 1 << 62, size=(num_layers, num_words), dtype=np.int64) << 1 | 1
        self._device_weights = torch.from_numpy(odd).to(device)

    def checksum(self, block_ids: Sequence[int]) -> list[int]:
        """A sum of the block's words, each times an odd number of its own, modulo 2⁶⁴."""
        sums = [(self._device_words[:, block] * self._device_weights).sum() for block in block_ids]
        return [value & 0xFFFFFFFFFFFFFFFF for value in torch.stack(sums).tolist()] if sums else []


class WindowedDeviceKVCache(KVCache):
    """A pool for each kind of layer: `num_blocks` for those that see all, pages for those with a window.

    Ids from `window.first_id` on name pages, as in WindowedKVCache. There is no `data` of all layers, only `layer`.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        num_blocks: int,
        window: WindowGroup,
        block_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.window, self._first_page = num_blocks, window, window.first_id
        num_full = list(windows).count(None)
        self._full = DeviceKVCache(num_full, num_blocks, block_shape, dtype, device)
        self._pages = DeviceKVCache(len(windows) - num_full, window.num_pages, block_shape, dtype, device)
        full, paged = iter(self._full.data), iter(self._pages.data)
        self._layers = [next(full if one is None else paged) for one in windows]

    def layer(self, index: int) -> torch.Tensor:
        return self._layers[index]

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        blocks, pages = self._by_pool(block_ids)
        self._full.fill(blocks, value)
        self._pages.fill(pages, value)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Of blocks, in the layers that see all."""
        self._full.copy(pairs)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._pages.copy(pairs)

    def checksum(self, block_ids: Sequence[int]) -> list[int]:
        blocks, pages = self._by_pool(block_ids)
        of_blocks, of_pages = iter(self._full.checksum(blocks)), iter(self._pages.checksum(pages))
        return [next(of_blocks if one < self._first_page else of_pages) for one in block_ids]

    def _by_pool(self, block_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Blocks, and pages by their own numbers, each in order."""
        first = self._first_page
        return [one for one in block_ids if one < first], [one - first for one in block_ids if one >= first]


def make_pool(
    plan: PoolPlan,
    windows: Sequence[int | None],
    block_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """Raises torch.OutOfMemoryError when it does not fit."""
    if plan.window is None:
        return DeviceKVCache(len(windows), plan.num_blocks, block_shape, dtype, device)
    return WindowedDeviceKVCache(windows, plan.num_blocks, plan.window, block_shape, dtype, device)
