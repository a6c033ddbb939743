"""Which blocks of a sequence its sliding-window layers still look at, and the pages that those blocks have there.

`seq.window_pages` are the pages of the blocks from `seq.window_start` on. They grow with each step that is scheduled
and shrink after it by what the next token will not see.
"""

from __future__ import annotations

from workers.block import Block
from workers.block_pool import BlockPool, PrefixMatch
from workers.sequence import Sequence
from workers.window_pages import NO_PAGE, WindowPages


class SlidingWindow:
    """Moves sequences' windows; the counting is WindowPages'."""

    def __init__(self, pool: BlockPool, pages: WindowPages, block_size: int) -> None:
        self.pages = pages
        self._pool = pool
        self._size = block_size
        self._most_seen = -(-pages.window // block_size) + 1  # blocks that one window can touch

    @property
    def has_room(self) -> bool:
        """Whether one more page can be had."""
        return self.pages.num_available > 0

    def may_start(self, match: PrefixMatch, num_blocks: int, num_running: int) -> bool:
        """Whether a newcomer with `num_blocks` to compute finds pages for a window, beside one for each that runs."""
        available = self.pages.num_available - self.pages.num_taken_by(match.blocks[match.window_start :])
        if num_running == 0:
            return available > 0
        return available >= min(num_blocks, self._most_seen) + num_running

    def start(self, seq: Sequence, match: PrefixMatch) -> None:
        """Opens the window on the end of a prefix hit."""
        seq.window_start = match.window_start
        seq.window_pages = [self.pages.hold(block) for block in match.blocks[match.window_start :]]

    def extend(self, seq: Sequence, num_tokens: int) -> int:
        """Takes pages for the next `num_tokens`; returns for how many of them there is room."""
        start = seq.num_computed_tokens
        end = seq.window_start + len(seq.window_pages)
        wanted = -(-(start + num_tokens) // self._size)
        for index in range(end, min(wanted, end + self.pages.num_available)):
            seq.window_pages.append(self.pages.assign(self._block(seq, index)))
        room = (seq.window_start + len(seq.window_pages)) * self._size
        return max(0, min(num_tokens, room - start))

    def pass_on(self, seq: Sequence) -> None:
        """After a step: lets go of the blocks that no later token sees."""
        num_passed = self.pages.first_seen(seq.num_computed_tokens) - seq.window_start
        if num_passed <= 0:
            return
        for index in range(seq.window_start, seq.window_start + num_passed):
            self.pages.let_go(self._block(seq, index))
        del seq.window_pages[:num_passed]
        seq.window_start += num_passed

    def fork(self, child: Sequence) -> None:
        """The child looks at what its sibling looks at."""
        for index in range(child.window_start, child.window_start + len(child.window_pages)):
            self.pages.hold(self._block(child, index))

    def close(self, seq: Sequence) -> None:
        """Before the sequence's blocks are released."""
        for index in reversed(range(seq.window_start, seq.window_start + len(seq.window_pages))):
            self.pages.let_go(self._block(seq, index))

    def copy_on_write(self, seq: Sequence, index: int, block: Block) -> tuple[int, int]:
        """(source, target) pages. The hold on the source passes to the step, as the reference to its block does."""
        at = index - seq.window_start
        source = seq.window_pages[at]
        seq.window_pages[at] = self.pages.assign(block)
        return source, seq.window_pages[at]

    def release_copy_source(self, block_id: int) -> None:
        self.pages.let_go(self._pool.blocks[block_id])

    def swap(self, seq: Sequence, index: int, published: Block) -> None:
        """Before the sequence's block `index` is exchanged for an equal one. One that lost its page gets ours."""
        block = self._block(seq, index)
        if self.pages.of_block[published.block_id] == NO_PAGE:
            self.pages.move(block, published)
            return
        seq.window_pages[index - seq.window_start] = self.pages.hold(published)
        self.pages.let_go(block)

    def _block(self, seq: Sequence, index: int) -> Block:
        return self._pool.blocks[seq.block_table[index]]
