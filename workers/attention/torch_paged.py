"""Paged attention in plain torch: the path where no kernel can be compiled, and the one that kernels are held against.

Every query token is a product of its own, of a shape that never changes, over tiles counted from the sequence's start.
So neither the batch, the chunk nor the placement of the blocks can change its bits.
"""

from __future__ import annotations

import numpy as np
import torch

from workers.model.batch import Batch

TILE_TOKENS = 64


def kv_block_shape(num_kv_heads: int, block_size: int, head_dim: int) -> tuple[int, ...]:
    return (2, num_kv_heads, block_size, head_dim)


def write_kv(blocks: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> None:
    """Stores key and value [T, kv_heads, head_dim] in `blocks` [blocks, 2, kv_heads, block_size, head_dim]."""
    active = torch.from_numpy(np.flatnonzero(batch.slot_blocks >= 0))
    where = torch.from_numpy(batch.slot_blocks).long()[active]
    offsets = torch.from_numpy(batch.slot_offsets).long()[active]
    blocks[where, 0, :, offsets] = key[active]
    blocks[where, 1, :, offsets] = value[active]


def paged_attention(
    query: torch.Tensor,
    blocks: torch.Tensor,
    batch: Batch,
    scale: float,
    window: int | None,
    tile_tokens: int,
) -> torch.Tensor:
    """[T, heads, head_dim] in the query's dtype; softmax and sums in float32. Padding tokens give zeros."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = blocks.shape[2], blocks.shape[3]
    group = num_heads // num_kv_heads
    grouped = query.view(num_tokens, num_kv_heads, group, head_dim).float() * scale
    total = torch.zeros_like(grouped)
    weight = torch.zeros(num_tokens, num_kv_heads, group)
    highest = torch.full((num_tokens, num_kv_heads, group), float("-inf"))
    tile = max(tile_tokens, block_size)
    positions = np.where(batch.slot_blocks >= 0, batch.positions, -1)
    for start in range(0, int(positions.max()) + 1, tile):
        needed = positions >= start
        if window is not None:
            needed &= positions - window + 1 < start + tile
        rows = np.flatnonzero(needed)
        if len(rows) == 0:
            continue
        if len(rows) == 1:  # torch multiplies a batch of one by another algorithm, with other bits
            rows = np.repeat(rows, 2)
        tables = batch.block_tables[batch.row_of[rows], start // block_size : (start + tile) // block_size]
        tables = np.pad(tables, ((0, 0), (0, tile // block_size - tables.shape[1])))
        index = torch.from_numpy(rows)
        updated = _tile_step(
            grouped[index], blocks[torch.from_numpy(tables).long()], positions[rows], start, window,
            total[index], weight[index], highest[index],
        )  # fmt: skip
        total[index], weight[index], highest[index] = updated
    result = total / torch.where(weight == 0, 1.0, weight)[..., None]
    return result.view(num_tokens, num_heads, head_dim).to(query.dtype)


def _tile_step(
    query: torch.Tensor,  # [N, kv_heads, group, head_dim]
    gathered: torch.Tensor,  # [N, blocks of the tile, 2, kv_heads, block_size, head_dim]
    positions: np.ndarray,  # [N]
    start: int,
    window: int | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    highest: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, num_kv_heads, group, head_dim = query.shape
    tile = gathered.shape[1] * gathered.shape[4]
    slots = np.arange(start, start + tile, dtype=np.int32)[None, :]
    seen = slots <= positions[:, None]
    if window is not None:
        seen &= slots > positions[:, None] - window
    visible = torch.from_numpy(seen)
    both = gathered.permute(2, 0, 3, 1, 4, 5).reshape(2, count, num_kv_heads, tile, head_dim).float()
    # What may not be seen may be anything, even NaN: it is replaced, never multiplied by zero.
    both = torch.where(visible[None, :, None, :, None], both, 0.0)
    flat = count * num_kv_heads
    scores = torch.bmm(query.reshape(flat, group, head_dim), both[0].reshape(flat, tile, head_dim).transpose(1, 2))
    scores = torch.where(visible[:, None, None, :], scores.view(count, num_kv_heads, group, tile), float("-inf"))
    top = torch.maximum(highest, scores.amax(-1))
    safe_top = torch.where(top == float("-inf"), 0.0, top)
    shares = torch.exp(scores - safe_top[..., None])
    shrink = torch.exp(highest - safe_top)
    added = torch.bmm(shares.reshape(flat, group, tile), both[1].reshape(flat, tile, head_dim)).view_as(query)
    ones = torch.ones(flat, tile, 1)
    share_sum = torch.bmm(shares.reshape(flat, group, tile), ones).view(count, num_kv_heads, group)
    return total * shrink[..., None] + added, weight * shrink + share_sum, top
