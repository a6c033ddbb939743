"""Faults of the prefix cache: what is published when, and what may still be found."""

from __future__ import annotations

from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.targets.stack import StackParts
from workers.block import Block, BlockContent, BlockIdentity, BlockWriter
from workers.block_pool import BlockPool, ChecksumBlocks, PrefixMatch
from workers.build import EngineParts
from workers.config import EngineConfig
from workers.event_log import BlockEventLog
from workers.prefix_cache import PrefixCache
from workers.scheduler import Scheduler
from workers.sequence import Sequence


class PublishesUnwritten(BlockPool):
    """Does not ask whether a block is full of written tokens before it can be found."""

    def publish(
        self, block: Block, content: BlockContent, parent: BlockIdentity | None, writer: BlockWriter
    ) -> Block | None:
        num_written, block.num_written = block.num_written, self._config.block_size
        published = super().publish(block, content, parent, writer)
        block.num_written = num_written
        return published


class PublishesAtAdmission(Scheduler):
    """A prompt's blocks can be found as soon as the sequence starts, before a step has written them."""

    def _start(self, seq: Sequence, match: PrefixMatch, num_blocks: int) -> None:
        super()._start(seq, match, num_blocks)
        size = self._config.block_size
        for index in range(seq.num_published_blocks, len(seq.block_keys)):
            block = self._pool.blocks[seq.block_table[index]]
            published = self._pool.publish(block, seq.content_of_block(index, size), seq.last_published, seq.writer)
            if published is not block:
                return
            seq.num_published_blocks = index + 1
            seq.last_published = block.identity


class KeepsEvictedKey(PrefixCache):
    """An evicted block's key still leads to it."""

    def remove(self, block: Block) -> None:
        content = block.content
        assert content is not None
        super().remove(block)
        self._index[content.key] = block.block_id

    def add(self, block: Block, content: BlockContent, parent: BlockIdentity | None) -> None:
        self._index.pop(content.key, None)
        super().add(block, content, parent)


class PoolKeepingEvictedKeys(BlockPool):
    def __init__(self, config: EngineConfig, log: BlockEventLog, checksum: ChecksumBlocks | None = None) -> None:
        super().__init__(config, log, checksum)
        self.cache = KeepsEvictedKey(self.blocks)


class HitOneTokenTooLong(Scheduler):
    """A hit counts one token more than its blocks hold: that position is never computed."""

    def _start(self, seq: Sequence, match: PrefixMatch, num_blocks: int) -> None:
        super()._start(seq, match, num_blocks)
        if match.blocks and seq.num_new_tokens > 1:
            seq.num_computed_tokens += 1


FAULTS = (
    Fault(
        "published_before_written",
        Component.PREFIX_CACHE,
        "blocks can be found before a step wrote them",
        lambda: StackParts(engine=EngineParts(block_pool=PublishesUnwritten, scheduler=PublishesAtAdmission)),
    ),
    Fault(
        "evicted_key_kept",
        Component.PREFIX_CACHE,
        "an evicted block's key still leads to it",
        lambda: StackParts(engine=EngineParts(block_pool=PoolKeepingEvictedKeys)),
    ),
    Fault(
        "hit_one_token_too_long",
        Component.PREFIX_CACHE,
        "a hit counts a token that its blocks do not hold",
        lambda: StackParts(engine=EngineParts(scheduler=HitOneTokenTooLong)),
    ),
)
