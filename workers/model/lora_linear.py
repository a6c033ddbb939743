"""A product to which some rows add an adapter's share. Rows of the base model are not touched: they keep their bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from workers.model.linear import Linear, Product, RowTile
from workers.model.lora import LoraPair

AdaptedRows = Iterable[tuple[str, torch.Tensor]]  # (adapter, indices of its tokens)


class LoraLinear:
    """`base` of all rows, and per adapter a pair of thin products of its own rows alone."""

    def __init__(self, base: Linear, adapters: Mapping[str, LoraPair], tile: RowTile) -> None:
        self.in_size, self.product = base.in_size, base.product
        self._base, self._tile = base, tile
        self._shares = {
            name: (Linear(pair.a, None, tile), Linear(pair.b, None, tile)) for name, pair in adapters.items()
        }

    def __call__(self, x: torch.Tensor, adapted: AdaptedRows = ()) -> torch.Tensor:
        """x [rows, in] → [rows, out]."""
        out = self._base(x)
        for name, rows in adapted:
            if name in self._shares:
                narrow, wide = self._shares[name]
                # Whole tiles where products are made of them: the row that fills up is computed and dropped.
                filled = rows.new_zeros(self._tile.pad(len(rows)))
                filled[: len(rows)] = rows
                out[rows] += wide(narrow(x[filled]))[: len(rows)]
        return out

    def share_products(self) -> Iterable[tuple[str, int, Product]]:
        """(name, input size, product) of each thin product."""
        for name, (narrow, wide) in self._shares.items():
            yield f"{name}.a", narrow.in_size, narrow.product
            yield f"{name}.b", wide.in_size, wide.product
