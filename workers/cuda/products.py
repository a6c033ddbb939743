"""Products with fixed weights whose rows do not depend on how many rows there are.

Each output is one program's sum over the whole input, in steps of the same size and order. Two shapes of tiles exist:
narrow ones that keep all processors busy when there are few rows, and wide ones for many. Whether they agree bit for
bit is asked of the device at start (`tiles_agree`); where they do not, the narrow one computes everything.
"""

# mypy: disallow-untyped-defs=False
# Kernels are typed when they are compiled.

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


NARROW = Tile(64, 32, 128, 4, 4)
WIDE = Tile(128, 128, 64, 8, 3)
MOST_NARROW_ROWS = 64
_GROUP_ROWS = 8  # row tiles that walk together over a column of weights, so that L2 serves it once


# Sizes and addresses that change from step to step must not make the compiler build another variant under way.
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x,  # [rows, depth]
    weight,  # [columns, depth]
    bias,  # [columns]
    out,  # [rows, columns]
    num_rows, num_columns, depth,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(num_rows, ROWS)
    num_tiles = row_tiles * tl.cdiv(num_columns, COLUMNS)
    steps = tl.arange(0, DEPTH)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        per_group = GROUP * tl.cdiv(num_columns, COLUMNS)
        group_first = tile // per_group * GROUP
        group_size = tl.minimum(row_tiles - group_first, GROUP)
        rows = (group_first + tile % per_group % group_size) * ROWS + tl.arange(0, ROWS)
        columns = tile % per_group // group_size * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = rows < num_rows, columns < num_columns
        x_rows = x + rows[:, None].to(tl.int64) * depth
        weight_rows = weight + columns[:, None].to(tl.int64) * depth
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(0, depth, DEPTH):
            is_step = at + steps < depth
            left = tl.load(x_rows + at + steps[None, :], mask=is_row[:, None] & is_step[None, :], other=0.0)
            right = tl.load(weight_rows + at + steps[None, :], mask=is_column[:, None] & is_step[None, :], other=0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        places = out + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def fixed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    """x [rows, in] · weight [out, in]ᵀ + bias, summed in float32."""
    assert x.is_contiguous()
    num_rows, num_columns = x.shape[0], weight.shape[0]
    out = x.new_empty(num_rows, num_columns)
    if num_rows == 0:
        return out
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    _product[(min(num_tiles, num_processors(x.device)),)](
        x, weight, weight if bias is None else bias, out, num_rows, num_columns, x.shape[1],
        HAS_BIAS=bias is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP=_GROUP_ROWS,
        PRECISION="ieee",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def num_processors(device: torch.device) -> int:
    """Programs that run at once; more would wait."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class ProductMode:
    """How products are made. One object for all products of a model; `fast` gives up that rows are independent."""

    def __init__(self, *, fast: bool = False, use_wide: bool = True) -> None:
        self.fast, self.use_wide = fast, use_wide

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.fast:
            return F.linear(x, weight, bias)
        is_wide = self.use_wide and x.shape[0] > MOST_NARROW_ROWS
        return fixed_product(x, weight, bias, WIDE if is_wide else NARROW)


def tiles_agree(weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether both tiles give this weight's outputs the same bits on its device."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2 * WIDE.rows + 1, weight.shape[1], generator=generator).to(weight)
    return torch.equal(fixed_product(x, weight, bias, NARROW), fixed_product(x, weight, bias, WIDE))
