"""The small operations between products, each a row at a time. A row's reduction has one order, whatever the batch."""

# mypy: disallow-untyped-defs=False
# Kernels are typed when they are compiled.

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(x, residual, weight, out, size, eps, ADDS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    is_column = columns < size
    value = tl.load(x + row * size + columns, mask=is_column, other=0.0)
    if ADDS:
        # The sum is rounded to the model's dtype before it is normed: as the residual stream keeps it.
        value = value + tl.load(residual + row * size + columns, mask=is_column, other=0.0)
        tl.store(residual + row * size + columns, value, mask=is_column)
    wide = value.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / size
    factors = tl.load(weight + columns, mask=is_column, other=0.0)
    tl.store(out + row * size + columns, (wide * tl.rsqrt(mean + eps) * factors).to(value.dtype), mask=is_column)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, size]; weight [size] float32. With `residual`, x is added to it in place first and the sum is normed."""
    assert x.is_contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    _rms_norm[(x.numel() // size,)](
        x, x if residual is None else residual, weight, out, size, eps,
        ADDS=residual is not None, SIZE=triton.next_power_of_2(size),
    )  # fmt: skip
    return out


@triton.jit
def _gated(x, out, size, IS_GELU: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_column = columns < size
    gate = tl.load(x + row * 2 * size + columns, mask=is_column, other=0.0)
    up = tl.load(x + row * 2 * size + size + columns, mask=is_column, other=0.0)
    wide = gate.to(tl.float32)
    if IS_GELU:
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        active = wide / (1.0 + tl.exp(-2.0 * inner))  # 0.5 · (1 + tanh(inner)) = sigmoid(2 · inner)
    else:
        active = wide / (1.0 + tl.exp(-wide))
    tl.store(out + row * size + columns, active.to(gate.dtype) * up, mask=is_column)


def gated(x: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """x [rows, 2 · size], gate then up → [rows, size]."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, size)
    width = min(1024, triton.next_power_of_2(size))
    _gated[(rows, triton.cdiv(size, width))](x, out, size, IS_GELU=is_gelu, SIZE=width)
    return out


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_blocks", "slot_offsets"])  # pieces of one copy
def _rotate_and_store(
    qkv,  # [T, (heads + 2 kv_heads) * HEAD]
    query,  # [T, heads * HEAD]
    blocks,  # [blocks, 2, kv_heads, BLOCK, HEAD]
    positions, slot_blocks, slot_offsets,  # [T]
    cos, sin,  # [positions, HEAD / 2] float32
    q_norm, k_norm,  # [HEAD] float32
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    block = tl.load(slot_blocks + token).to(tl.int64)
    if block < 0:
        return
    dims = tl.arange(0, HALF_PADDED)
    is_dim = dims < HALF
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD
    low = tl.load(source + dims, mask=is_dim, other=0.0)
    high = tl.load(source + HALF + dims, mask=is_dim, other=0.0)
    slot = (block * (2 * KV_HEADS) + head - HEADS) * (BLOCK * HEAD) + tl.load(slot_offsets + token) * HEAD
    if head < HEADS:
        target = query + (token * HEADS + head) * HEAD
        factors = q_norm
    else:
        # Key heads follow the query heads and value heads the key heads, in qkv as inside a block.
        target = blocks + slot
        factors = k_norm
    if head < HEADS + KV_HEADS:
        dtype = low.dtype
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(wide_low * wide_low, 0) + tl.sum(wide_high * wide_high, 0)) / HEAD + eps)
            wide_low = wide_low * scale * tl.load(factors + dims, mask=is_dim, other=0.0)
            wide_high = wide_high * scale * tl.load(factors + HALF + dims, mask=is_dim, other=0.0)
            # Rounded where the norm ends, as transformers and the CPU path do.
            wide_low, wide_high = wide_low.to(dtype).to(tl.float32), wide_high.to(dtype).to(tl.float32)
        angle = tl.load(positions + token) * HALF + dims
        c = tl.load(cos + angle, mask=is_dim, other=0.0)
        s = tl.load(sin + angle, mask=is_dim, other=0.0)
        low = (wide_low * c - wide_high * s).to(dtype)
        high = (wide_high * c + wide_low * s).to(dtype)
    tl.store(target + dims, low, mask=is_dim)
    tl.store(target + HALF + dims, high, mask=is_dim)


def rotate_and_store(
    qkv: torch.Tensor,
    blocks: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    table: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    num_heads: int,
    eps: float,
) -> torch.Tensor:
    """Norms and turns the heads of qkv [T, …]; K and V go into `blocks`. Returns the queries [T, heads · head_dim].

    `places` is (positions, slot_blocks, slot_offsets); padding tokens (block −1) write nothing and ask with zeros.
    """
    num_kv_heads, block_size, head_dim = blocks.shape[2:]
    query = qkv.new_zeros(qkv.shape[0], num_heads * head_dim)
    cos, sin = table
    q_norm, k_norm = norms if norms is not None else table
    _rotate_and_store[(qkv.shape[0], num_heads + 2 * num_kv_heads)](
        qkv, query, blocks, *places, cos, sin, q_norm, k_norm, eps,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD=head_dim,
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        BLOCK=block_size,
        HAS_NORM=norms is not None,
    )  # fmt: skip
    return query
