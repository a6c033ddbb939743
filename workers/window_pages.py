"""Where the sliding-window layers keep a block's K and V, for as long as anybody may still look at them.

A block's place in those layers is a page. Once the window has passed a block, its page goes to whoever needs one next;
a block that can be found in the prefix cache keeps the page until then. A page belongs to one block in one life and to
nobody else, so whoever may read a block may read its page, and all that is checked of the one holds for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from workers.block import Block
from workers.config import EngineConfig
from workers.step import WindowGroup

NO_PAGE = 0  # page 0 is nobody's and stays zero: it stands where a block has none


class WindowPages:
    """A page is free, idle (its block is in the prefix cache, nobody's window covers it) or held.

    `of_block` is what a block has, NO_PAGE for nothing. `lives` counts how often a page was given out, `num_written`
    the leading token slots that were written since.
    """

    def __init__(
        self, group: WindowGroup, config: EngineConfig, checksum: Callable[[Sequence[int]], list[int]] | None = None
    ) -> None:
        """Raises ValueError when the pages do not suffice for one sequence alone."""
        self.window = group.num_tokens
        self.num_pages = group.num_pages
        self.of_block = [NO_PAGE] * config.num_blocks
        self.block_of: list[int | None] = [None] * group.num_pages
        self.lives = [0] * group.num_pages
        self.num_written = [0] * group.num_pages
        self.num_evictions = 0
        self._size = config.block_size
        self._first_id = group.first_id
        self._checksum = checksum
        self._checksums: list[int | None] = [None] * group.num_pages
        self._num_holders = [0] * config.num_blocks
        self._users: list[bytes | None] = [None] * group.num_pages
        self._must_zero: set[int] = set()
        self._free = deque(range(1, group.num_pages))
        self._idle: dict[int, None] = {}  # blocks, least recently used first
        self._idle_pinned: set[int] = set()  # blocks
        self._to_zero: list[int] = []
        self._stale = set(range(1, group.num_pages))
        self.num_held = 0
        most_needed = group.pages_alone(config.max_num_batched_tokens, config.block_size)
        spare = group.num_pages - 1 - most_needed
        if spare < 0:
            raise ValueError(f"{group.num_pages} window pages are too few: one sequence may need {most_needed + 1}")
        self.max_pinned = min(spare, int(group.num_pages * config.max_pinned_fraction))

    # --- counts

    @property
    def num_available(self) -> int:
        """Free, or idle and not pinned."""
        return len(self._free) + len(self._idle)

    @property
    def num_missing(self) -> int:
        """How far free + idle + held is from the total; 0 while the books are right."""
        return self.num_pages - 1 - self.num_available - len(self._idle_pinned) - self.num_held

    def check_integrity(self, blocks: Sequence[Block]) -> None:
        """Each page in one place, both directions of the map agree, nothing is kept for a block that has no use."""
        given = {page: block for block, page in enumerate(self.of_block) if page != NO_PAGE}
        assert len(given) == len(self.of_block) - self.of_block.count(NO_PAGE), "a page has two blocks"
        assert set(self._free) | given.keys() == set(range(1, self.num_pages)), "a page is lost"
        assert len(self._free) + len(given) == self.num_pages - 1, "a page is free and given out"
        assert all(self.block_of[page] == block for page, block in given.items())
        assert all(self.block_of[page] is None for page in self._free)
        assert self.num_held == sum(1 for num in self._num_holders if num)
        for block in blocks:
            number = block.block_id
            is_idle = self.of_block[number] != NO_PAGE and not self._num_holders[number]
            assert (number in self._idle or number in self._idle_pinned) == is_idle
            assert number not in self._idle_pinned or block.is_pinned
            assert not is_idle or block.content is not None, "a page is kept for what nobody can find"
            assert self._num_holders[number] <= block.ref_count, "a window is open on a block that was released"
            assert not self._num_holders[number] or self.of_block[number] != NO_PAGE

    # --- prefix hits

    def longest_hit(self, found: Sequence[Block]) -> tuple[int, int]:
        """How many leading blocks of a verified run can serve, and from which on their pages are needed: all that the
        token after them sees must be there."""
        end = index = len(found)
        while index > self.first_seen(end * self._size):
            index -= 1
            if self.of_block[found[index].block_id] == NO_PAGE:
                end = index
        return end, min(self.first_seen(end * self._size), end)

    def first_seen(self, position: int) -> int:
        """The first block of which a token at `position` sees anything."""
        return max(0, position - self.window + 1) // self._size

    def num_taken_by(self, blocks: Sequence[Block]) -> int:
        """How many available pages a hit on `blocks` would make unavailable."""
        return sum(1 for block in blocks if block.block_id in self._idle)

    # --- holding

    def assign(self, block: Block) -> int:
        """A page for a block about to be written, held once. The caller asked `num_available`."""
        assert self.of_block[block.block_id] == NO_PAGE
        if not self._free:
            self._evict()
        page = self._free.popleft()
        self.of_block[block.block_id] = page
        self.block_of[page] = block.block_id
        self.lives[page] += 1
        self.num_written[page] = block.num_written  # of a copy on write; else 0
        self._users[page] = block.user_hash
        self._num_holders[block.block_id] = 1
        self.num_held += 1
        self._stale.add(page)
        return page

    def hold(self, block: Block) -> int:
        """One more window covers the block."""
        number = block.block_id
        assert self.of_block[number] != NO_PAGE, "the page is gone"
        if not self._num_holders[number]:
            self._idle.pop(number, None)
            self._idle_pinned.discard(number)
            self.num_held += 1
        self._num_holders[number] += 1
        return self.of_block[number]

    def let_go(self, block: Block) -> None:
        """A window has passed the block, or its sequence ended. Before the block itself is released."""
        number = block.block_id
        assert self._num_holders[number] > 0, "let go more often than held"
        self._num_holders[number] -= 1
        if self._num_holders[number]:
            return
        self.num_held -= 1
        if block.content is None:
            self._take_back(block)
        elif block.is_pinned:
            self._idle_pinned.add(number)
        else:
            self._idle[number] = None

    def move(self, block: Block, target: Block) -> int:
        """`target` holds the same content, verified, and has lost its page: it gets the block's and its one holder."""
        page = self.of_block[block.block_id]
        assert self.of_block[target.block_id] == NO_PAGE
        assert self._num_holders[block.block_id] == 1
        self.of_block[block.block_id], self._num_holders[block.block_id] = NO_PAGE, 0
        self.of_block[target.block_id], self._num_holders[target.block_id] = page, 1
        self.block_of[page] = target.block_id
        return page

    def note_written(self, block: Block) -> None:
        page = self.of_block[block.block_id]
        assert page != NO_PAGE, "written without a page"
        self.num_written[page] = block.num_written

    def note_retracted(self, block: Block) -> None:
        """The block can no longer be found. Windows that cover it stay open."""
        if self.of_block[block.block_id] != NO_PAGE and not self._num_holders[block.block_id]:
            self._take_back(block)

    def note_pinned(self, block: Block) -> None:
        if block.block_id in self._idle:
            del self._idle[block.block_id]
            self._idle_pinned.add(block.block_id)

    def note_unpinned(self, block: Block) -> None:
        if block.block_id in self._idle_pinned:
            self._idle_pinned.discard(block.block_id)
            self._idle[block.block_id] = None

    # --- bytes

    def keep_checksum(self, block: Block) -> None:
        page = self.of_block[block.block_id]
        if self._checksum is not None and page != NO_PAGE:
            self._checksums[page] = self._checksum([self._first_id + page])[0]

    def num_damaged(self, blocks: Sequence[Block]) -> int:
        """How many pages of these blocks differ from what they were when the checksum was taken."""
        pages = [page for block in blocks if self._checksums[page := self.of_block[block.block_id]] is not None]
        if self._checksum is None or not pages:
            return 0
        found = self._checksum([self._first_id + page for page in pages])
        return sum(self._checksums[page] != value for page, value in zip(pages, found, strict=True))

    def purge(self, user_hash: bytes) -> None:
        """What the user left in free pages is overwritten now, what is in use when it comes back."""
        for page, user in enumerate(self._users):
            if user != user_hash:
                continue
            if self.block_of[page] is None:
                self._mark_for_zeroing(page)
            else:
                self._must_zero.add(page)

    def drain_zeroing(self) -> list[int]:
        """Ids, as the runner knows pages, to be overwritten before the next step."""
        pages, self._to_zero = self._to_zero, []
        return [self._first_id + page for page in pages]

    def drain_stale(self) -> list[int]:
        """Ids of pages that nobody may read: free or newly given out since the last call, and not written since."""
        stale, self._stale = self._stale, set()
        return [
            self._first_id + page for page in sorted(stale) if self.block_of[page] is None or not self.num_written[page]
        ]

    def _evict(self) -> None:
        number = next(iter(self._idle))
        del self._idle[number]
        self.num_evictions += 1
        self._free_page(number)

    def _take_back(self, block: Block) -> None:
        number = block.block_id
        self._idle.pop(number, None)
        self._idle_pinned.discard(number)
        if block.must_zero:
            self._must_zero.add(self.of_block[number])
        self._free_page(number)

    def _free_page(self, number: int) -> None:
        page = self.of_block[number]
        self.of_block[number] = NO_PAGE
        self.block_of[page] = None
        self._checksums[page] = None
        self._free.append(page)
        self._stale.add(page)
        if page in self._must_zero:
            self._must_zero.discard(page)
            self._mark_for_zeroing(page)

    def _mark_for_zeroing(self, page: int) -> None:
        self._to_zero.append(page)
        self._users[page] = None
