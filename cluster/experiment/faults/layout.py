"""Faults between the step record and the forward pass: masks, tables, padding and positions of a batch.

A ForwardModel stands around the real one and changes the integers that it reads, as a slip in building them would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.targets.stack import StackParts
from workers.forward_model import ForwardModel
from workers.kv_cache import KVCache
from workers.model.batch import Batch
from workers.model.linear import Product

Change = Callable[[Batch, KVCache], Batch]


class ChangedBatch:
    """A ForwardModel that changes each batch before the real one sees it."""

    def __init__(self, model: ForwardModel, change: Change) -> None:
        self._model = model
        self._change = change
        self.spec, self.dtype, self.kv_layout = model.spec, model.dtype, model.kv_layout
        self.kernel, self.row_tile = model.kernel, model.row_tile

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        return self._model.kv_block_shape(block_size)

    def row_products(self) -> dict[str, tuple[int, Product]]:
        return self._model.row_products()

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        return self._model.forward(self._change(batch, cache), cache)


def _with(change: Change) -> Callable[[], StackParts]:
    return lambda: StackParts(wrap_model=lambda model: ChangedBatch(model, change))


def _block_size(batch: Batch) -> int:
    """Of the batch alone: offsets run from 0 to block_size - 1, and a prefill of more than one block shows them all."""
    return int(batch.slot_offsets.max()) + 1


def _tokens_of(batch: Batch, row: int) -> np.ndarray:
    """Indices of a row's real tokens."""
    return np.flatnonzero((batch.row_of == row) & (batch.slot_blocks >= 0))


def _mask_of_wrong_row(batch: Batch, cache: KVCache) -> Batch:
    """The query of each row's last token sees the keys of the row before it."""
    num_rows = len(batch.block_tables)
    row_of = batch.row_of.copy()
    row_of[batch.sample_tokens] = (row_of[batch.sample_tokens] - 1) % num_rows
    return replace(batch, row_of=row_of)


def _table_of_wrong_row(batch: Batch, cache: KVCache) -> Batch:
    """In steps that mix prefill and decode, the block tables are one row off."""
    num_rows = len(batch.block_tables)
    if num_rows < 2 or batch.num_tokens == num_rows:
        return batch
    return replace(batch, block_tables=np.ascontiguousarray(np.roll(batch.block_tables, 1, axis=0)))


def _last_token_of_padded_row(batch: Batch, cache: KVCache) -> Batch:
    """The token to sample from is taken at the padded length: padding is not masked out."""
    samples = [np.flatnonzero(batch.row_of == batch.row_of[token])[-1] for token in batch.sample_tokens]
    return replace(batch, sample_tokens=np.asarray(samples, dtype=np.int32))


def _padding_written(batch: Batch, cache: KVCache) -> Batch:
    """Slot −1 is taken for the last slot of the pool, so padding overwrites whatever lies there."""
    is_padding = batch.slot_blocks < 0
    blocks = np.where(is_padding, cache.num_blocks - 1, batch.slot_blocks).astype(np.int32)
    return replace(batch, slot_blocks=blocks)


def _padding_in_block_zero(batch: Batch, cache: KVCache) -> Batch:
    """The slots of padding tokens are left at zero, the first slot of the first block."""
    return replace(batch, slot_blocks=np.maximum(batch.slot_blocks, 0))


def _positions_run_on(batch: Batch, cache: KVCache) -> Batch:
    """Positions of a packed prefill go on from the row before, as far as the row's own blocks reach."""
    if (batch.slot_blocks < 0).any():
        return batch  # padded: every row has a line of its own
    positions = batch.positions.copy()
    num_before = 0
    for row in range(len(batch.block_tables)):
        tokens = _tokens_of(batch, row)
        if len(tokens) > 1 and num_before:
            room = _block_size(batch) - 1 - int(batch.slot_offsets[tokens[-1]])
            positions[tokens] += min(num_before, room)
        num_before += len(tokens)
    return replace(batch, positions=positions)


def _positions_restart(batch: Batch, cache: KVCache) -> Batch:
    """The positions of a prefill that is not the first row begin at 0, though its prefix was computed before."""
    positions = batch.positions.copy()
    for row in range(1, len(batch.block_tables)):
        tokens = _tokens_of(batch, row)
        if len(tokens) > 1 and positions[tokens[0]] > 0:
            positions[tokens] -= positions[tokens[0]]
    return replace(batch, positions=positions)


class _BitFlip:
    """Flips one bit of a block that a request reads as its cached prefix; once in so many steps."""

    PERIOD = 8

    def __init__(self) -> None:
        self._num_prefix_reads = 0

    def __call__(self, batch: Batch, cache: KVCache) -> Batch:
        for row in range(len(batch.block_tables)):
            tokens = _tokens_of(batch, row)
            if len(tokens) > 1 and batch.positions[tokens[0]] > 0:
                self._num_prefix_reads += 1
                if self._num_prefix_reads % self.PERIOD == 1:
                    words = cache.data[0, int(batch.block_tables[row, 0])].view(torch.int16).flatten()
                    words[0] ^= 1 << 13  # a high bit of the exponent
        return batch


FAULTS = (
    Fault("mask_of_wrong_row", Component.LAYOUT_MASK, "a query sees another row's keys", _with(_mask_of_wrong_row)),
    Fault("table_of_wrong_row", Component.LAYOUT_MASK, "block tables are one row off", _with(_table_of_wrong_row)),
    Fault(
        "padding_not_masked",
        Component.LAYOUT_MASK,
        "the last token is looked for at the padded length",
        _with(_last_token_of_padded_row),
    ),
    Fault("slot_minus_one", Component.LAYOUT_MASK, "padding is written to slot −1, the last", _with(_padding_written)),
    Fault(
        "padding_in_block_zero", Component.LAYOUT_MASK, "padding is written to slot 0", _with(_padding_in_block_zero)
    ),
    Fault("positions_run_on", Component.POSITIONS, "positions go on across packed rows", _with(_positions_run_on)),
    Fault("positions_restart", Component.POSITIONS, "positions begin at 0 after a hit", _with(_positions_restart)),
    Fault(
        "bit_flip_in_shared_block",
        Component.BLOCK_POOL,
        "one bit of a cached block flips",
        lambda: StackParts(wrap_model=lambda model: ChangedBatch(model, _BitFlip())),
    ),
)
