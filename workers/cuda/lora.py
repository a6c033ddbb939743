"""A product on the device to which some rows add an adapter's share: as workers/model/lora_linear.py."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from workers.cuda.products import ProductMode
from workers.model.lora import LoraPair

AdaptedRows = Iterable[tuple[bytes, torch.Tensor]]  # (digest of an adapter, indices of its tokens)


class DeviceLinear:
    """Weight [out, in], bias [out], and per adapter a pair of thin products of its own rows alone."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        mode: ProductMode,
    ) -> None:
        self.weight, self.bias, self._mode = weight, bias, mode
        self.in_size = weight.shape[1]
        self._pairs: dict[bytes, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, digest: bytes, pair: LoraPair) -> None:
        self._pairs[digest] = (pair.a.to(self.weight.device), pair.b.to(self.weight.device))

    def drop(self, digest: bytes) -> None:
        self._pairs.pop(digest, None)

    def share_products(self) -> Iterable[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        """(digest in hex, the pair) of each adapter."""
        return ((digest.hex(), pair) for digest, pair in self._pairs.items())

    def __call__(self, x: torch.Tensor, adapted: AdaptedRows = ()) -> torch.Tensor:
        """x [rows, in] → [rows, out]."""
        out = self._mode(x, self.weight, self.bias)
        for digest, rows in adapted:
            if digest in self._pairs:
                narrow, wide = self._pairs[digest]
                out[rows] += self._mode(self._mode(x[rows], narrow, None), wide, None)
        return out
