"""How much memory the KV pool takes: one place for a block in all layers, or two where some layers have a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workers.runner_config import RunnerConfig
from workers.step import WindowGroup


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """`window` is None where every layer keeps every block."""

    num_blocks: int
    window: WindowGroup | None = None

    def num_bytes(self, windows: Sequence[int | None], layer_block_bytes: int) -> int:
        num_windowed = 0 if self.window is None else sum(window is not None for window in windows)
        pages = 0 if self.window is None else self.window.num_pages
        return ((len(windows) - num_windowed) * self.num_blocks + num_windowed * pages) * layer_block_bytes


def plan_pool(
    config: RunnerConfig, windows: Sequence[int | None], layer_block_bytes: int, budget_bytes: int | None
) -> PoolPlan:
    """The pool of `config.num_blocks`, or the largest that fits into the budget. `windows` are the layers', None: all
    tokens; `layer_block_bytes` is a block in one layer. Raises ValueError when not one block fits."""
    if budget_bytes is None:
        assert config.num_blocks is not None
        return _plan(config, windows, config.num_blocks)
    if budget_bytes < len(windows) * layer_block_bytes:
        raise ValueError(f"kv_cache_bytes is {budget_bytes}, one block needs {len(windows) * layer_block_bytes}")
    low, high = 1, int(budget_bytes / layer_block_bytes / config.window_fraction) + 1  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if _plan(config, windows, middle).num_bytes(windows, layer_block_bytes) <= budget_bytes:
            low = middle
        else:
            high = middle
    return _plan(config, windows, low)


def _plan(config: RunnerConfig, windows: Sequence[int | None], num_blocks: int) -> PoolPlan:
    longest = max((window for window in windows if window is not None), default=None)
    if longest is None or config.window_fraction == 1.0:
        return PoolPlan(num_blocks)
    alone = WindowGroup(longest, 0, 0).pages_alone(config.max_num_batched_tokens, config.block_size)
    num_pages = 1 + max(alone, math.ceil(num_blocks * config.window_fraction))
    if num_pages >= num_blocks:
        return PoolPlan(num_blocks)
    return PoolPlan(num_blocks, WindowGroup(longest, num_pages, num_blocks))
