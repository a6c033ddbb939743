"""A step's rows as flat integer arrays: what the forward pass reads. Knows nothing of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from workers.step import StepRow

Ints = NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    """T tokens of R sequences. Padding tokens have block −1: they are computed, written nowhere and read by nobody."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    row_of: Ints  # [T] which block table a token reads
    slot_blocks: Ints  # [T] physical block that takes the token's K and V, or −1
    slot_offsets: Ints  # [T]
    block_tables: Ints  # [R, most blocks of a row]
    sample_tokens: Ints  # [S] indices of the tokens whose logits are wanted, in row order
    adapted: tuple[tuple[bytes, Ints], ...] = ()  # (digest of an adapter, indices of its tokens)
    windowed: Batch | None = None  # what the sliding-window layers read, where their K and V lie in pages of their own

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def build_batch(rows: list[StepRow], block_size: int, layout: str, pad_rows: Callable[[int], int]) -> Batch:
    """Packs the rows one after the other, or each padded to the longest. `pad_rows` rounds the token count up."""
    longest = max(len(row.token_ids) for row in rows)
    spans = [longest if layout == "padded" else len(row.token_ids) for row in rows]
    total = pad_rows(sum(spans))
    ints = np.zeros((5, total), dtype=np.int32)
    token_ids, positions, row_of, slot_blocks, slot_offsets = ints
    slot_blocks.fill(-1)
    tables = np.zeros((len(rows), max(len(row.block_table) for row in rows)), dtype=np.int32)
    samples = []
    adapted: dict[bytes, list[Ints]] = {}
    at = 0
    for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
        count = len(row.token_ids)
        here = slice(at, at + count)
        tables[index, : len(row.block_table)] = row.block_table
        token_ids[here] = row.token_ids
        row_of[at : at + span] = index
        if count == 1:  # decode rows are many: keep them cheap
            positions[at] = row.start
            slot_blocks[at] = row.block_table[row.start // block_size]
            slot_offsets[at] = row.start % block_size
        else:
            where = np.arange(row.start, row.start + count, dtype=np.int32)
            positions[here] = where
            slot_blocks[here] = tables[index, where // block_size]
            slot_offsets[here] = where % block_size
        if row.samples:
            samples.append(at + count - 1)
        if row.adapter_digest is not None:
            adapted.setdefault(row.adapter_digest, []).append(np.arange(at, at + count, dtype=np.int32))
        at += span
    batch = Batch(
        token_ids, positions, row_of, slot_blocks, slot_offsets, tables, np.asarray(samples, dtype=np.int32),
        tuple((digest, np.concatenate(parts)) for digest, parts in adapted.items()),
    )  # fmt: skip
    if rows[0].window_pages:
        batch.windowed = _over_pages(batch, rows, block_size)
    return batch


def _over_pages(batch: Batch, rows: list[StepRow], block_size: int) -> Batch:
    """The same tokens over the rows' pages; page 0, which is zero, stands for what has left the window."""
    tables = np.zeros_like(batch.block_tables)
    for index, row in enumerate(rows):
        tables[index, row.window_start : row.window_start + len(row.window_pages)] = row.window_pages
    places = tables[batch.row_of, batch.positions // block_size]
    return replace(batch, slot_blocks=np.where(batch.slot_blocks >= 0, places, -1), block_tables=tables)
