"""Which simulated worker holds which block: one bit mask of owners per block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.api.ids import WorkerId


class OwnerIndex:
    def __init__(self, worker_ids: Sequence[WorkerId]) -> None:
        self._worker_ids = worker_ids
        self._owners: dict[int, int] = {}
        self.num_blocks_of = [0] * len(worker_ids)

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, worker: int, block_ids: Iterable[int]) -> None:
        owners, bit = self._owners, 1 << worker
        added = 0
        for block_id in block_ids:
            mask = owners.get(block_id, 0)
            added += not mask & bit
            owners[block_id] = mask | bit
        self.num_blocks_of[worker] += added

    def remove(self, worker: int, block_ids: Iterable[int]) -> None:
        owners, bit = self._owners, 1 << worker
        for block_id in block_ids:
            mask = owners.get(block_id, 0)
            if not mask & bit:
                continue
            self.num_blocks_of[worker] -= 1
            if mask == bit:
                del owners[block_id]
            else:
                owners[block_id] = mask ^ bit

    def match(self, block_ids: Sequence[int]) -> dict[WorkerId, int]:
        """Leading blocks that each worker holds; workers with none are left out."""
        matched: dict[WorkerId, int] = {}
        owners = self._owners
        alive = -1
        depth = 0
        for depth, block_id in enumerate(block_ids):
            remaining = alive & owners.get(block_id, 0)
            if remaining != alive:
                if depth:
                    self._note(matched, alive ^ remaining, depth)
                alive = remaining
                if not alive:
                    return matched
        if alive > 0:
            self._note(matched, alive, depth + 1)
        return matched

    def _note(self, matched: dict[WorkerId, int], mask: int, depth: int) -> None:
        while mask:
            bit = mask & -mask
            matched[self._worker_ids[bit.bit_length() - 1]] = depth
            mask ^= bit
