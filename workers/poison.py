"""Overwrites stale memory, so that a read of it shows in the output instead of going unnoticed."""

from __future__ import annotations

from workers.block_pool import BlockPool
from workers.step import ModelRunner


class Poisoner:
    """Before each step fills every block that was freed or newly allocated: unwritten tails included."""

    def __init__(self, pool: BlockPool, runner: ModelRunner, value: float) -> None:
        self._pool = pool
        self._runner = runner
        self._value = value

    def apply(self) -> None:
        block_ids = self._pool.drain_stale()
        if block_ids:
            self._runner.fill_blocks(block_ids, self._value)
