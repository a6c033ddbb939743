"""A product on the device to which some rows add an adapter's share: as workers/model/lora_linear.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from workers.cuda.products import ProductMode
from workers.model.lora import LoraPair

AdaptedRows = Iterable[tuple[str, torch.Tensor]]  # (adapter, indices of its tokens)


class DeviceLinear:
    """Weight [out, in], bias [out], and per adapter a pair of thin products of its own rows alone."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        mode: ProductMode,
        adapters: Mapping[str, LoraPair] | None = None,
    ) -> None:
        self.weight, self.bias, self._mode = weight, bias, mode
        self.in_size = weight.shape[1]
        device = weight.device
        self._pairs = {name: (pair.a.to(device), pair.b.to(device)) for name, pair in (adapters or {}).items()}

    def __call__(self, x: torch.Tensor, adapted: AdaptedRows = ()) -> torch.Tensor:
        """x [rows, in] → [rows, out]."""
        out = self._mode(x, self.weight, self.bias)
        for name, rows in adapted:
            if name in self._pairs:
                narrow, wide = self._pairs[name]
                out[rows] += self._mode(self._mode(x[rows], narrow, None), wide, None)
        return out
