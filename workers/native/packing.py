"""Weights in the layout of gemm.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from workers.native.arena import Arena
from workers.native.structs import PackedStruct

BLOCK = 32
_BLOCK_BYTES = 2 * BLOCK * BLOCK


def blocks_of(size: int) -> int:
    return -(-size // BLOCK)


def packed_bytes(num_columns: int, k: int) -> int:
    return blocks_of(num_columns) * blocks_of(k) * _BLOCK_BYTES


def plain_order(n: int) -> np.ndarray:
    """Column c is output c; −1 pads to a whole block."""
    order = np.full(blocks_of(n) * BLOCK, -1, dtype=np.int32)
    order[:n] = np.arange(n)
    return order


def gated_order(intermediate: int) -> np.ndarray:
    """16 columns of the gate, then the same 16 of `up`, so that one block holds both factors of its outputs."""
    columns = -(-intermediate // 16) * 16
    gate = np.full(columns, -1, dtype=np.int32)
    gate[:intermediate] = np.arange(intermediate)
    up = np.where(gate >= 0, gate + intermediate, -1).astype(np.int32)
    return np.stack([gate.reshape(-1, 16), up.reshape(-1, 16)], axis=1).reshape(-1)


@dataclass
class PackedLinear:
    """A packed weight and its bias; `struct` points into both."""

    data: torch.Tensor
    bias: torch.Tensor | None
    struct: PackedStruct


def pack(
    library: ctypes.CDLL, arena: Arena, weight: torch.Tensor, order: np.ndarray, bias: torch.Tensor | None = None
) -> PackedLinear:
    """weight [n, k] bfloat16, columns in `order`."""
    weight = weight.contiguous()
    n, k = weight.shape
    n_blocks, k_blocks = len(order) // BLOCK, blocks_of(k)
    data = arena.take(n_blocks * k_blocks * _BLOCK_BYTES)
    order = np.ascontiguousarray(order, dtype=np.int32)
    library.ww_pack(weight.data_ptr(), k, order.ctypes.data, n_blocks, k_blocks, data.data_ptr())
    padded_bias = None
    if bias is not None:
        padded_bias = torch.zeros(n_blocks * BLOCK)
        padded_bias[:n] = bias.float()
    struct = PackedStruct(
        data.data_ptr(), None if padded_bias is None else padded_bias.data_ptr(), n, k, n_blocks, k_blocks
    )
    return PackedLinear(data, padded_bias, struct)
