"""Finds the registered template whose canonical blocks a raw prompt begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    owner: bytes | None = None  # template digest of some template that has this block
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class BlockTrie:
    """A tree over blocks. Where several templates share a beginning, the smallest digest owns it, so that every
    gateway names the same one."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._root = _Node()

    def add(self, digest: bytes, token_ids: Sequence[int]) -> None:
        """`token_ids` are whole blocks."""
        node = self._root
        size = self._block_size
        assert len(token_ids) % size == 0
        for start in range(0, len(token_ids), size):
            node = node.children.setdefault(tuple(token_ids[start : start + size]), _Node())
            node.owner = digest if node.owner is None else min(node.owner, digest)

    def longest_match(self, token_ids: Sequence[int]) -> tuple[bytes, int] | None:
        """(template digest, number of leading blocks); None when not even the first block is known."""
        node, num_blocks = self._root, 0
        size = self._block_size
        for start in range(0, len(token_ids) - size + 1, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            node, num_blocks = child, num_blocks + 1
        return None if node.owner is None else (node.owner, num_blocks)
