"""Paged attention on GPUs: one row kernel for prefill and decode.

A program owns ROWS rows: a few query tokens of one sequence, times the query heads that share one KV head. It walks
over tiles of TILE_TOKENS slots counted from the sequence's own start, reading K and V where the block table says. The
numbers of a row meet only their own: the number of rows, and with it the instruction that multiplies them, is the same
in every call, and a tile in which a row sees nothing leaves that row's sums untouched. So no chunking, batch or
placement of the blocks can change a row's bits.
"""

# mypy: disallow-untyped-defs=False
# Kernels are typed when they are compiled.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from workers.model.batch import Ints

TILE_TOKENS = 64  # fixed: another value gives other bits
ROWS = 64  # of one program: 16 would do for decode, but then decode and prefill would use different instructions
NUM_WARPS = 4


# Sizes and addresses that change from step to step must not make the compiler build another variant under way.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables", "group_first", "group_count", "row_of", "positions"],
)
def _attend(
    query,  # [T, heads * HEAD]
    blocks,  # [blocks, 2, kv_heads, BLOCK, HEAD]
    tables,  # [R, table_stride] int32
    group_first,  # [groups] first query token
    group_count,  # [groups] number of query tokens, 0 for padding
    row_of,  # [T]
    positions,  # [T]
    out,  # as query
    table_stride,
    scale,
    WINDOW: tl.constexpr,  # tokens that a row sees, itself included; 0 = all before it
    SHARE: tl.constexpr,  # query heads of one KV head
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(1)
    first = tl.load(group_first + tl.program_id(0))
    count = tl.load(group_count + tl.program_id(0))
    rows = tl.arange(0, ROWS)
    tokens = first + rows // SHARE
    is_row = rows // SHARE < count
    where = tl.load(positions + tokens, mask=is_row, other=-1)
    last = tl.max(where, axis=0)
    table = tables + tl.load(row_of + first).to(tl.int64) * table_stride

    dims = tl.arange(0, HEAD_PADDED)
    is_dim = dims < HEAD
    columns = (kv_head * SHARE + rows % SHARE) * HEAD
    places = tokens[:, None].to(tl.int64) * (KV_HEADS * SHARE * HEAD) + columns[:, None] + dims[None, :]
    asked = tl.load(query + places, mask=is_row[:, None] & is_dim[None, :], other=0.0)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    start = 0
    if WINDOW > 0:
        # The earliest slot that any row of this program sees; whole tiles before it are seen by none.
        earliest = tl.min(tl.where(is_row, where, last), axis=0) - WINDOW + 1
        start = tl.maximum(earliest, 0) // TILE * TILE
    for begin in range(start, last + 1, TILE):
        slots = begin + tl.arange(0, TILE)
        is_slot = slots <= last  # what lies behind is never read: it may be anything, even NaN
        if WINDOW > 0:
            is_slot &= slots >= earliest
        block = tl.load(table + slots // BLOCK, mask=is_slot, other=0).to(tl.int64)
        keys = (block * (2 * KV_HEADS) + kv_head) * (BLOCK * HEAD) + (slots % BLOCK) * HEAD
        both = is_slot[:, None] & is_dim[None, :]
        key = tl.load(blocks + keys[:, None] + dims[None, :], mask=both, other=0.0)
        values = keys + KV_HEADS * BLOCK * HEAD
        value = tl.load(blocks + values[:, None] + dims[None, :], mask=both, other=0.0)
        scores = tl.dot(asked, tl.trans(key), input_precision=PRECISION) * scale
        is_seen = slots[None, :] <= where[:, None]
        if WINDOW > 0:
            is_seen &= slots[None, :] > where[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
        tile_highest = tl.max(scores, axis=1)
        sees_any = tile_highest > float("-inf")
        new_highest = tl.maximum(highest, tile_highest)
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shares = tl.exp(scores - safe[:, None])
        shrink = tl.exp(highest - safe)
        added = tl.dot(shares.to(value.dtype), value, input_precision=PRECISION)
        total = tl.where(sees_any[:, None], total * shrink[:, None] + added, total)
        weight = tl.where(sees_any, weight * shrink + tl.sum(shares, axis=1), weight)
        highest = tl.where(sees_any, new_highest, highest)
    result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(out + places, result.to(asked.dtype), mask=is_row[:, None] & is_dim[None, :])


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model fixes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float

    @property
    def tokens_per_group(self) -> int:
        """Query tokens that one program can own."""
        return max(1, ROWS // (self.num_heads // self.num_kv_heads))


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """A step's index arrays on the device. Padding tokens have position −1 and padding groups count 0."""

    tables: torch.Tensor  # [R, width] int32
    group_first: torch.Tensor  # [G]
    group_count: torch.Tensor  # [G]
    row_of: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]


def check_shape(shape: AttentionShape) -> None:
    """Raises ValueError, naming what the kernel does not do."""
    share = shape.num_heads // shape.num_kv_heads
    if share > ROWS:
        raise ValueError(f"{share} query heads share a KV head, the attention kernel takes up to {ROWS}")


def make_groups(row_of: Ints, is_active: np.ndarray, most: int) -> tuple[Ints, Ints]:
    """(first, count): runs of active tokens of one sequence, cut to `most`. How they are cut changes no bit."""
    active = np.flatnonzero(is_active).astype(np.int32)
    if len(active) == 0:
        return active, active
    is_start = np.ones(len(active), dtype=bool)
    is_start[1:] = (np.diff(active) != 1) | (np.diff(row_of[active]) != 0)
    starts = np.flatnonzero(is_start)
    lengths = np.diff(np.append(starts, len(active)))
    pieces = -(-lengths // most)
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = active[np.repeat(starts, pieces)] + within * most
    count = np.minimum(most, np.repeat(lengths, pieces) - within * most)
    return first.astype(np.int32), count.astype(np.int32)


def paged_attention(
    query: torch.Tensor, blocks: torch.Tensor, inputs: AttentionInputs, shape: AttentionShape, window: int | None
) -> torch.Tensor:
    """query [T, heads · head_dim], blocks [blocks, 2, kv_heads, block_size, head_dim]; padding tokens give zeros."""
    out = torch.zeros_like(query)
    if len(inputs.group_first) == 0:
        return out
    _attend[(len(inputs.group_first), shape.num_kv_heads)](
        query, blocks, inputs.tables, inputs.group_first, inputs.group_count, inputs.row_of, inputs.positions, out,
        inputs.tables.stride(0), shape.scale,
        WINDOW=window or 0,
        SHARE=shape.num_heads // shape.num_kv_heads,
        KV_HEADS=shape.num_kv_heads,
        HEAD=shape.head_dim,
        HEAD_PADDED=max(16, triton.next_power_of_2(shape.head_dim)),
        BLOCK=shape.block_size,
        TILE=TILE_TOKENS,
        ROWS=ROWS,
        PRECISION="ieee",  # float32 products in float32; 16-bit ones are not concerned
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
