"""A worker's prefix cache: at most `capacity` blocks, the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class LruCache:
    __slots__ = ("_blocks", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def use(self, block_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Marks `block_ids` as used now and stores the missing ones; returns those stored and those evicted.

        Marked from the end, so that of one prompt the deepest block is evicted first: a prefix without its beginning
        is of no use.
        """
        blocks = self._blocks
        stored = []
        for block_id in reversed(block_ids):
            if block_id in blocks:
                blocks.move_to_end(block_id)
            else:
                blocks[block_id] = None
                stored.append(block_id)
        evicted = []
        while len(blocks) > self.capacity:
            evicted.append(blocks.popitem(last=False)[0])
        return stored, evicted
