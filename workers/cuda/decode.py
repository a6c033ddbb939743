"""Decode steps from buffers that never move, one captured step per batch bucket.

A CUDA graph repeats its launches with the addresses of the time it was captured; so inputs are copied into fixed
buffers, and a batch is padded to its bucket with rows that are computed, write nothing and are read by nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from workers.cuda.triton_model import StepTensors, TritonModel
from workers.kv_cache import KVCache
from workers.model.batch import Batch

Compute = Callable[[], torch.Tensor]
Capture = Callable[[Compute], Compute]  # gives back what repeats the computation on the same addresses
_NAMES = ("token_ids", "positions", "slot_blocks", "slot_offsets", "group_count")
_PAGED_NAMES = (*_NAMES, "window_blocks")  # where layers with a sliding window have a pool of their own


def decode_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then multiples of 8 up to 64, then of 32, up to `most`."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(96, most + 32, 32)}
    return (*(size for size in sorted(sizes) if size < most), most)


class DecodeSteps:
    """All buckets share the buffers of the largest one. Not for two threads at once."""

    def __init__(
        self, model: TritonModel, cache: KVCache, max_num_seqs: int, blocks_per_row: int, capture: Capture
    ) -> None:
        device = model.device
        self._model, self._device = model, device
        self._pools = [cache.layer(index) for index in range(model.spec.num_layers)]
        self._names = _NAMES if cache.window is None else _PAGED_NAMES
        # The copy to the device has long ended when these are written again: a step ends with its tokens on the host.
        # Flat: a bucket's part is contiguous, else the copy would go through unpinned memory and wait.
        size = len(self._names) * max_num_seqs
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._integers = torch.zeros(size, dtype=torch.int32, device=device)
        # One for all buckets: each graph would keep its own for ever.
        self._logits = torch.empty(max_num_seqs, model.spec.vocab_size, dtype=torch.float32, device=device)
        num_groups = 1 if cache.window is None else 2
        self._tables = torch.zeros(num_groups, max_num_seqs, blocks_per_row, dtype=torch.int32, device=device)
        self._counting = torch.arange(max_num_seqs, dtype=torch.int32, device=device)
        self._pad(self._part(self._host, max_num_seqs), 0)
        self._integers.copy_(self._host)
        self.buckets = decode_buckets(max_num_seqs)
        # Largest first: the smaller ones then live in its memory.
        self._steps = {bucket: capture(self._computation(bucket)) for bucket in reversed(self.buckets)}

    def fits(self, batch: Batch) -> bool:
        """Whether this is a pure decode step: one token and one sample per row, base model only, no padding."""
        count = len(batch.block_tables)
        return (
            batch.num_tokens == count == len(batch.sample_tokens)
            and count <= self.buckets[-1]
            and not batch.adapted
            and bool((batch.slot_blocks >= 0).all())
        )

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [rows, vocab] float32 on the device, valid until the next call."""
        count = batch.num_tokens
        bucket = next(size for size in self.buckets if size >= count)
        lines = [batch.token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets, np.ones(count, np.int32)]
        tables = [batch.block_tables]
        if batch.windowed is not None:
            lines.append(batch.windowed.slot_blocks)
            tables.append(batch.windowed.block_tables)
        assert (len(lines), len(tables)) == (len(self._names), len(self._tables)), "captured for another pool"
        host = self._part(self._host, bucket)
        host[:, :count] = torch.from_numpy(np.stack(lines))
        self._pad(host, count)
        self._part(self._integers, bucket).copy_(host, non_blocking=True)
        both = torch.from_numpy(np.stack(tables))
        if self._device.type == "cuda":
            both = both.pin_memory()
        self._tables[:, :count, : both.shape[2]].copy_(both, non_blocking=True)
        return self._steps[bucket]()[:count]

    def _part(self, flat: torch.Tensor, bucket: int) -> torch.Tensor:
        """[names, bucket]"""
        return flat[: len(self._names) * bucket].view(len(self._names), bucket)

    def _pad(self, host: torch.Tensor, start: int) -> None:
        """Token 0, at position −1 of block −1, in an empty group."""
        padding = {"token_ids": 0, "positions": -1, "slot_blocks": -1, "group_count": 0, "window_blocks": -1}
        for line, name in zip(host, self._names, strict=True):
            if name in padding:
                line[start:] = padding[name]

    def _computation(self, bucket: int) -> Compute:
        lines = dict(zip(self._names, self._part(self._integers, bucket), strict=True))
        counting, tables = self._counting[:bucket], self._tables[:, :bucket]
        step = StepTensors(
            row_of=counting, group_first=counting, sample_tokens=counting, tables=tables[0], window_tables=tables[-1],
            **{"window_blocks": lines["slot_blocks"], **lines},
        )  # fmt: skip
        return lambda: self._logits[:bucket].copy_(self._model.run(step, self._pools))


def capture_graph(compute: Compute) -> Compute:
    """Records the launches once, after a run that compiles the kernels. Needs a CUDA device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, pool=_graph_pool()):
        logits = compute()

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay


_pool: list[Any] = []


def _graph_pool() -> Any:
    """One memory pool for all graphs: they never run at the same time."""
    if not _pool:
        _pool.append(torch.cuda.graph_pool_handle())
    return _pool[0]
