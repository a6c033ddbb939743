"""A product to which some rows add an adapter's share. Rows of the base model are not touched: they keep their bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from workers.model.linear import Linear, Product, RowTile
from workers.model.lora import LoraPair

AdaptedRows = Iterable[tuple[bytes, torch.Tensor]]  # (digest of an adapter, indices of its tokens)


class LoraLinear:
    """`base` of all rows, and per adapter a pair of thin products of its own rows alone."""

    def __init__(self, base: Linear, tile: RowTile) -> None:
        self.in_size, self.product = base.in_size, base.product
        self._base, self._tile = base, tile
        self._shares: dict[bytes, tuple[Linear, Linear]] = {}

    def add(self, digest: bytes, pair: LoraPair) -> None:
        self._shares[digest] = (Linear(pair.a, None, self._tile), Linear(pair.b, None, self._tile))

    def drop(self, digest: bytes) -> None:
        self._shares.pop(digest, None)

    def __call__(self, x: torch.Tensor, adapted: AdaptedRows = ()) -> torch.Tensor:
        """x [rows, in] → [rows, out]."""
        out = self._base(x)
        for digest, rows in adapted:
            if digest in self._shares:
                narrow, wide = self._shares[digest]
                # Whole tiles where products are made of them: the row that fills up is computed and dropped.
                filled = rows.new_zeros(self._tile.pad(len(rows)))
                filled[: len(rows)] = rows
                out[rows] += wide(narrow(x[filled]))[: len(rows)]
        return out

    def share_products(self) -> Iterable[tuple[str, int, Product]]:
        """(name, input size, product) of each thin product."""
        for digest, (narrow, wide) in self._shares.items():
            yield f"{digest.hex()}.a", narrow.in_size, narrow.product
            yield f"{digest.hex()}.b", wide.in_size, wide.product
