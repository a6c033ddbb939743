"""Large zeroed memory on huge pages where the system gives them: weights and KV blocks are read from end to end."""

from __future__ import annotations

import contextlib
import mmap

import torch

ALIGNMENT = 64
_HUGE_PAGE = 1 << 21


def huge_zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes]; the pages come into being when first touched."""
    size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % _HUGE_PAGE
    return whole[skip : skip + num_bytes]


class Arena:
    """Hands out pieces of one huge allocation."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = huge_zeros(num_bytes)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        start = self._used
        self._used = start + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        assert self._used <= len(self._memory), "the arena was sized for less"
        return self._memory[start : start + num_bytes]
