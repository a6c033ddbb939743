"""Cosine and sine tables of the rotary embedding."""

from __future__ import annotations

import math

import torch

from workers.model.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def rotary_table(rope: RopeSpec, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [num_positions, head_dim / 2] float32."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    return angles.cos(), angles.sin()


def _llama3(rope: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / span
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / rope.factor, frequencies)
    between = (wavelengths <= shortest_stretched) & (wavelengths >= longest_kept)
    return torch.where(between, blended, stretched)
