"""Makes blocks findable after the step that wrote them, never before."""

from __future__ import annotations

from cache_service.block_key import BlockKeyer
from workers.block_pool import BlockPool
from workers.config import EngineConfig
from workers.scheduler import ScheduledRow
from workers.sequence import Sequence
from workers.sliding_window import SlidingWindow


class Publisher:
    """Publishes the blocks that a row has filled, in order, each hanging on the one before."""

    def __init__(self, config: EngineConfig, pool: BlockPool, keyer: BlockKeyer) -> None:
        self._config = config
        self._pool = pool
        self._keyer = keyer
        self._window = None if pool.pages is None else SlidingWindow(pool, pool.pages, config.block_size)

    def note_written(self, row: ScheduledRow) -> None:
        """Called after the step: K and V of the row's tokens are in its blocks."""
        seq = row.seq
        seq.num_computed_tokens = row.end
        size = self._config.block_size
        for index in range(row.start // size, (row.end - 1) // size + 1):
            self._pool.note_written(seq.block_table[index], min(size, row.end - index * size), seq.writer)
        if self._config.prefix_caching and seq.can_publish:
            while seq.can_publish and (seq.num_published_blocks + 1) * size <= row.end:
                self._publish_next(seq)
        if self._window is not None:
            self._window.pass_on(seq)

    def _publish_next(self, seq: Sequence) -> None:
        index = seq.num_published_blocks
        if index == len(seq.block_keys):
            seq.derive_key(index, self._keyer)
        block = self._pool.blocks[seq.block_table[index]]
        content = seq.content_of_block(index, self._config.block_size)
        published = self._pool.publish(block, content, seq.last_published, seq.writer)
        if published is None:
            seq.can_publish = False  # whatever follows would hang on a block that nobody can find
            return
        if published is not block:
            # Someone published the same content meanwhile. Holding that block instead keeps the chain of identities
            # unbroken for the blocks to come, and saves one.
            self._pool.share(published, seq.writer)
            if self._window is not None:
                self._window.swap(seq, index, published)
            seq.block_table[index] = published.block_id
            self._pool.release((block.block_id,), seq.writer)
        seq.num_published_blocks = index + 1
        seq.last_published = published.identity
