"""Faults in the lifetime of blocks: reference counts, the free list, eviction, copy on write."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.targets.stack import StackParts
from workers.block import Block, BlockWriter
from workers.block_pool import BlockPool
from workers.build import EngineParts
from workers.scheduler import Schedule, Scheduler
from workers.sequence import Sequence


class FreesWhileReferenced(BlockPool):
    """The first holder that lets go of a shared block frees it for all; the others' releases find nothing to do."""

    def release(self, block_ids: Iterable[int], writer: BlockWriter) -> None:
        for block_id in block_ids:
            block = self.blocks[block_id]
            block.ref_count = min(block.ref_count, 1)
            if block.ref_count:
                super().release((block_id,), writer)


class FreesTwice(BlockPool):
    """The last block of a finished sequence enters the free list a second time."""

    def release(self, block_ids: Iterable[int], writer: BlockWriter) -> None:
        block_ids = list(block_ids)
        super().release(block_ids, writer)
        if block_ids and self.blocks[block_ids[0]].ref_count == 0 and self.blocks[block_ids[0]].content is None:
            self._free.append(block_ids[0])

    def allocate(self, writer: BlockWriter) -> Block:
        # In a build without assertions the second owner would simply get the block.
        self.blocks[self._free[0] if self._free else 0].ref_count = 0
        return super().allocate(writer)


class EvictsBlockInUse(BlockPool):
    """Eviction takes a published block without asking whether someone holds it."""

    def _evict(self) -> Block:
        held = [block for block in self.blocks if block.content is not None and block.ref_count > 0]
        if held:
            block = held[0]
            block.ref_count = 0
            self.num_in_use -= 1
            self._evictable = {block.block_id: None, **self._evictable}
        return super()._evict()

    def release(self, block_ids: Iterable[int], writer: BlockWriter) -> None:
        super().release([block_id for block_id in block_ids if self.blocks[block_id].ref_count], writer)


class WritesSharedBlock(Scheduler):
    """Copy on write is left out: two choices of a request write to the same partly filled block."""

    def _make_writable(self, seq: Sequence, schedule: Schedule) -> bool:
        index = seq.num_computed_tokens // self._config.block_size
        if index < len(seq.block_table):
            return True
        return super()._make_writable(seq, schedule)


def _with_pool(pool: type[BlockPool]) -> StackParts:
    return StackParts(engine=EngineParts(block_pool=pool))


FAULTS = (
    Fault(
        "freed_while_referenced",
        Component.BLOCK_POOL,
        "the first release of a shared block frees it",
        lambda: _with_pool(FreesWhileReferenced),
    ),
    Fault("double_free", Component.BLOCK_POOL, "a block is freed twice", lambda: _with_pool(FreesTwice)),
    Fault(
        "evicts_block_in_use",
        Component.BLOCK_POOL,
        "eviction does not ask for references",
        lambda: _with_pool(EvictsBlockInUse),
    ),
    Fault(
        "partial_block_shared",
        Component.BLOCK_POOL,
        "two choices write to one partly filled block",
        lambda: StackParts(engine=EngineParts(scheduler=WritesSharedBlock)),
    ),
)
