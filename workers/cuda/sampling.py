"""Draws tokens on the device, one program per draw: nothing of another row enters. Same rules as workers/sampler.py.

The noise is the same function of (seed, choice, position). The rest differs in two details, so that the tokens of a CPU
worker are not promised: candidates are ordered by id when the distribution is inverted, and tokens that are exactly as
likely as the last one that top-k or top-p lets in are let in with it.
"""

# mypy: disallow-untyped-defs=False
# Kernels are typed when they are compiled.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.noise import uniform
from workers.step import SampleInput

TILE = 4096
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0: shares run from 0 to 1, and their bits count up with them


@triton.jit
def _shares(row, at, vocab, highest, temperature, TILE: tl.constexpr):
    ids = at + tl.arange(0, TILE)
    logits = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
    return tl.exp((logits - highest) / temperature)


@triton.jit
def _floor_of_mass(row, vocab, highest, temperature, floor, wanted, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """The highest share that, with all above it, makes up `wanted` (mass, or with COUNTS tokens). Bisects its bits."""
    low, high = tl.cast(0, tl.int32), tl.cast(_ONE, tl.int32)
    while low < high:
        middle = high - (high - low) // 2
        border = tl.maximum(middle.to(tl.float32, bitcast=True), floor)
        held = tl.cast(0.0, tl.float32)
        for at in range(0, vocab, TILE):
            shares = _shares(row, at, vocab, highest, temperature, TILE)
            held += tl.sum(tl.where(shares >= border, 1.0 if COUNTS else shares, 0.0), axis=0)
        if held >= wanted:
            low = middle
        else:
            high = middle - 1
    return tl.maximum(low.to(tl.float32, bitcast=True), floor)


@triton.jit(do_not_specialize_on_alignment=["rows", "temperatures", "top_ks", "top_ps", "min_ps", "noises"])
def _draw(
    logits, rows, temperatures, top_ks, top_ps, min_ps, noises, out, vocab, row_stride, TILE: tl.constexpr
):  # fmt: skip
    draw = tl.program_id(0)
    row = logits + tl.load(rows + draw).to(tl.int64) * row_stride
    temperature = tl.load(temperatures + draw)
    highest = tl.cast(float("-inf"), tl.float32)
    best = tl.cast(0, tl.int32)
    for at in range(0, vocab, TILE):
        ids = at + tl.arange(0, TILE)
        tile = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        top = tl.max(tile, axis=0)
        if top > highest:  # the lowest id among equals
            highest = top
            best = at + tl.min(tl.where(tile == top, tl.arange(0, TILE), TILE), axis=0)
    if temperature > 0.0:
        floor = tl.load(min_ps + draw)
        top_k = tl.load(top_ks + draw)
        if (top_k > 0) & (top_k < vocab):
            by_count = _floor_of_mass(row, vocab, highest, temperature, 0.0, top_k.to(tl.float32), True, TILE)
            floor = tl.maximum(floor, by_count)
        mass = tl.cast(0.0, tl.float32)
        for at in range(0, vocab, TILE):
            shares = _shares(row, at, vocab, highest, temperature, TILE)
            mass += tl.sum(tl.where(shares >= floor, shares, 0.0), axis=0)
        top_p = tl.load(top_ps + draw)
        if top_p < 1.0:
            floor = _floor_of_mass(row, vocab, highest, temperature, floor, mass * top_p, False, TILE)
            mass = tl.cast(0.0, tl.float32)
            for at in range(0, vocab, TILE):
                shares = _shares(row, at, vocab, highest, temperature, TILE)
                mass += tl.sum(tl.where(shares >= floor, shares, 0.0), axis=0)
        target = tl.load(noises + draw) * mass
        before = tl.cast(0.0, tl.float32)
        is_found = tl.cast(0, tl.int32)
        # If rounding keeps every sum at or below the target, the most likely token stays: it has a share.
        for at in range(0, vocab, TILE):
            shares = _shares(row, at, vocab, highest, temperature, TILE)
            kept = tl.where((shares >= floor) & (shares > 0.0), shares, 0.0)
            sums = before + tl.cumsum(kept, axis=0)
            place = tl.min(tl.where((sums > target) & (kept > 0.0), tl.arange(0, TILE), TILE), axis=0)
            if (is_found == 0) & (place < TILE):
                best = at + place
                is_found = tl.cast(1, tl.int32)
            before += tl.sum(kept, axis=0)
    tl.store(out + draw, best)


@dataclass(frozen=True, slots=True)
class Draws:
    """The settings of a step's draws on the device, one entry each."""

    rows: torch.Tensor  # [D] int32: which row of logits
    numbers: torch.Tensor  # [4, D] float32: temperature, top-p, min-p, noise
    top_ks: torch.Tensor  # [D] int32


def is_drawn_on_device(one: SampleInput) -> bool:
    """Whether the kernel does all that is asked for; the other draws' rows are read back and left to Sampler."""
    params = one.params
    return not (
        params.logprobs is not None
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or one.position < params.min_tokens
    )


def make_draws(wanted: Sequence[tuple[int, SampleInput]], device: torch.device) -> Draws:
    """`wanted` holds (row of logits, what to draw). One small copy, without waiting."""
    numbers = [
        [0.0 if one.params.is_greedy else one.params.temperature for _, one in wanted],
        [one.params.top_p for _, one in wanted],
        [one.params.min_p for _, one in wanted],
        [uniform(one.params.seed, one.choice, one.position) for _, one in wanted],
    ]
    integers = [[row for row, _ in wanted], [one.params.top_k for _, one in wanted]]
    rows, top_ks = _to_device(torch.tensor(integers, dtype=torch.int32), device)
    return Draws(rows, _to_device(torch.tensor(numbers, dtype=torch.float32), device), top_ks)


def draw_tokens(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """logits [rows, vocab] float32 → tokens [D] int32."""
    out = torch.empty_like(draws.rows)
    temperatures, top_ps, min_ps, noises = draws.numbers
    vocab = logits.shape[1]
    _draw[(len(out),)](
        logits, draws.rows, temperatures, draws.top_ks, top_ps, min_ps, noises, out, vocab, logits.stride(0),
        TILE=min(TILE, triton.next_power_of_2(vocab)),
    )  # fmt: skip
    return out


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
