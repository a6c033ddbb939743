"""A product with fixed weights, laid out once; in bfloat16 in oneDNN's own layout: the same bits, sooner.

torch picks another algorithm for another number of rows, and with it other bits. Where the self-test finds that, every
product is made of calls with one fixed number of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] → [rows, out]


class RowTile:
    """`rows` of each call, or None where any number gives the same bits. One object for all products of a model."""

    def __init__(self, rows: int | None = None) -> None:
        self.rows = rows

    def pad(self, num_rows: int) -> int:
        """Rows to compute so that whole tiles are."""
        return num_rows if self.rows is None else -(-num_rows // self.rows) * self.rows


class Linear:
    """Weight [out, in], bias [out]. Takes as many rows as there are, or whole tiles."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, tile: RowTile) -> None:
        self.in_size = weight.shape[1]
        self._tile = tile
        self.product = _make_product(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tile = self._tile.rows
        if tile is None or len(x) == tile:
            return self.product(x)
        assert len(x) % tile == 0, "rows are padded to whole tiles before the first product"
        return torch.cat([self.product(part) for part in x.split(tile)])


def _make_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
    if weight.dtype == torch.float32:
        return lambda x: F.linear(x, weight, bias)
    # In 16 bits torch has a routine of its own for a single row, with other bits: no product has a single row.
    return lambda x: F.linear(x if len(x) > 1 else x.expand(2, -1), weight, bias)[: len(x)]
