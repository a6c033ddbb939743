"""A product with fixed weights, laid out once; in bfloat16 in oneDNN's own layout: the same bits, sooner."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out]"""
        ...


class PlainLinear:
    """torch's own product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class ReorderedLinear:
    """oneDNN's product on weights in its blocked layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest layout that torch offers for the weight's dtype."""
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ReorderedLinear(weight, bias)
    return PlainLinear(weight, bias)
