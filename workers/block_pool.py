"""The paged pool: which block is free, cached or in use, and by how many.

A block is in exactly one of three places: free (no references, no content), cached (no references, findable) or in
use. Cached blocks are evicted least recently used first, unless pinned. References of a sequence are released from its
last block to its first, so that a block is always evicted before the one it hangs on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile

from cluster.api.ids import BlockKey
from cluster.api.scope import Scope
from workers.block import Block, BlockContent, BlockIdentity, BlockWriter
from workers.config import EngineConfig
from workers.event_log import BlockAction, BlockEventLog
from workers.prefix_cache import PrefixCache
from workers.window_pages import WindowPages

ChecksumBlocks = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A verified run of published blocks, not yet referenced."""

    blocks: tuple[Block, ...] = ()
    num_wanted: int = 0
    is_mismatch: bool = False
    window_start: int = 0  # from which block on the sliding-window layers' pages are needed too


NO_MATCH = PrefixMatch()


class BlockPool:
    """Owns the Block records. Knows nothing of sequences, steps or tensors."""

    def __init__(self, config: EngineConfig, log: BlockEventLog, checksum: ChecksumBlocks | None = None) -> None:
        self.blocks = [Block(block_id) for block_id in range(config.num_blocks)]
        # Each block's generation, negative while it has no references: what the structure check compares.
        self.lives = [0] * config.num_blocks
        self.num_in_use = 0
        self.cache = PrefixCache(self.blocks)
        self.now_s = 0.0
        self.pages: WindowPages | None = None  # only where the model has sliding-window layers
        self._config = config
        self._log = log
        self._checksum = checksum
        self._checksum_credit = 0.0  # one checksum is taken for each whole unit
        self._free: deque[int] = deque(range(config.num_blocks))
        self._evictable: dict[int, None] = {}  # cached and unpinned, oldest first
        self._idle_pinned: set[int] = set()  # cached and pinned
        self._num_pinned_of: dict[bytes | None, int] = {}
        self._to_zero: list[int] = []
        self._stale = set(range(config.num_blocks))  # allocated or freed since last drained

    def use_pages(self, pages: WindowPages) -> None:
        """Before the first allocation: from now on a block's K and V lie in two places."""
        self.pages = pages
        self.cache.on_retract = pages.note_retracted

    # --- counts

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._evictable) + len(self._idle_pinned)

    @property
    def num_available(self) -> int:
        """Free or evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def num_pinned(self) -> int:
        return sum(self._num_pinned_of.values())

    @property
    def num_missing(self) -> int:
        """The cheap form of `check_integrity`: how far free + cached + in use is from the total, by counts only."""
        missing = len(self.blocks) - self.num_free - self.num_cached - self.num_in_use
        return missing if self.pages is None else abs(missing) + abs(self.pages.num_missing)

    def check_integrity(self) -> None:
        """free + cached + in use == total, each block in one place, the index true. Costs a walk over all blocks."""
        free, evictable, pinned = set(self._free), set(self._evictable), self._idle_pinned
        in_use = {block.block_id for block in self.blocks if block.ref_count > 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert len(free) + len(evictable) + len(pinned) + len(in_use) == len(self.blocks), "a block is lost or doubled"
        assert free | evictable | pinned | in_use == set(range(len(self.blocks)))
        for block in self.blocks:
            assert block.ref_count >= 0
            assert self.lives[block.block_id] == (block.generation if block.ref_count else -block.generation)
            if block.content is not None:
                assert self.cache.find(block.content.key) is block
                assert block.num_written == self._config.block_size, "published before written"
            assert (block.block_id in evictable | pinned) == (block.ref_count == 0 and block.content is not None)
            assert block.block_id not in pinned or block.is_pinned
        assert self.num_in_use == len(in_use)
        assert len(self.cache) == sum(block.content is not None for block in self.blocks)
        if self.pages is not None:
            self.pages.check_integrity(self.blocks)

    # --- references

    def match(self, wanted: Sequence[BlockContent], user_hash: bytes) -> PrefixMatch:
        """The blocks that may serve as the beginning of a sequence of this user's. Changes nothing."""
        found, is_mismatch = self.cache.match(wanted, user_hash)
        if self.pages is None:
            return PrefixMatch(tuple(found), len(wanted), is_mismatch)
        num_usable, window_start = self.pages.longest_hit(found)
        return PrefixMatch(tuple(found[:num_usable]), len(wanted), is_mismatch, window_start)

    def can_allocate(self, num_blocks: int, match: PrefixMatch = NO_MATCH) -> bool:
        """Whether `num_blocks` are available once the matched ones are referenced and so no longer evictable."""
        taken = sum(1 for block in match.blocks if block.block_id in self._evictable)
        return self.num_available - taken >= num_blocks

    def acquire(self, match: PrefixMatch, writer: BlockWriter) -> list[int]:
        """References the matched blocks, before anything is allocated, so that none of them can be evicted."""
        self.cache.note_lookup(match.blocks, match.num_wanted, match.is_mismatch)
        for block in match.blocks:
            self.share(block, writer)
        return [block.block_id for block in match.blocks]

    def share(self, block: Block, writer: BlockWriter) -> None:
        """One more reference to a block that is cached or in use."""
        if block.ref_count == 0:
            assert block.content is not None, "only a published block may be taken up again"
            self._leave_cached(block)
            self._enter_use(block)
        if writer.is_warm_up and not block.is_pinned:
            self._pin_again(block)
        block.ref_count += 1
        self._log.record(BlockAction.REUSE, block, writer.request_id)

    def allocate(self, writer: BlockWriter) -> Block:
        """A block of its own for `writer`; evicts when none is free. The caller asked `can_allocate`."""
        block = self.blocks[self._free.popleft()] if self._free else self._evict()
        assert block.ref_count == 0
        assert block.content is None
        block.generation += 1
        block.ref_count = 1
        self._enter_use(block)
        block.owner = writer.request_id
        block.user_hash = writer.user_hash
        block.num_written = 0
        block.must_zero = self.cache.is_entombed(writer)
        block.is_retracted = False
        self._stale.add(block.block_id)
        self._log.record(BlockAction.ALLOCATE, block, writer.request_id)
        return block

    def release(self, block_ids: Iterable[int], writer: BlockWriter) -> None:
        """Gives back one reference each. Pass a sequence's blocks from last to first."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            assert block.ref_count > 0, "released more often than referenced"
            block.ref_count -= 1
            self._log.record(BlockAction.RELEASE, block, writer.request_id)
            if block.ref_count == 0:
                block.last_used_s = self.now_s
                self.lives[block_id] = -block.generation
                self.num_in_use -= 1
                self._retire(block)

    def has_intact_bytes(self, match: PrefixMatch) -> bool:
        """Compares checksums with those taken at publication. A difference empties the cache and ends all sharing:
        nothing in it, nor anything that hangs on the damaged block, is worth keeping."""
        sampled = [block for block in match.blocks if block.checksum is not None]
        if self._checksum is None or not sampled:
            return True
        found = self._checksum([block.block_id for block in sampled])
        num_damaged = sum(block.checksum != value for block, value in zip(sampled, found, strict=True))
        if self.pages is not None:
            num_damaged += self.pages.num_damaged(match.blocks[match.window_start :])
        if num_damaged:
            self.cache.counters.checksum_failures += num_damaged
            self.cache.is_sharing = False
            self.clear()
        return num_damaged == 0

    # --- publication

    def note_written(self, block_id: int, num_written: int, writer: BlockWriter) -> None:
        """K and V of the block's leading `num_written` slots are in place."""
        block = self.blocks[block_id]
        block.num_written = num_written
        if self.pages is not None:
            self.pages.note_written(block)
        self._log.record(BlockAction.WRITE, block, writer.request_id)

    def publish(
        self, block: Block, content: BlockContent, parent: BlockIdentity | None, writer: BlockWriter
    ) -> Block | None:
        """Makes a fully written block findable. Returns the block that now goes by the key: `block`, or an equal one
        published earlier, which the caller should use instead; None when it must stay private."""
        assert block.num_written == self._config.block_size, "published before written"
        if not self.cache.may_publish(content, parent, writer):
            return None
        existing = self.cache.find(content.key)
        if existing is None:
            wants_pin = content.fields.scope <= Scope.TEMPLATE
            if wants_pin and not self._can_pin(content.fields.tenant):
                return None
            self._add(block, content, parent, is_pinned=wants_pin)
            self._log.record(BlockAction.PUBLISH, block, writer.request_id)
            return block
        if self.cache.matches(existing, content, parent):
            return existing
        self.cache.counters.publish_conflicts += 1
        return None

    def _add(self, block: Block, content: BlockContent, parent: BlockIdentity | None, is_pinned: bool) -> None:
        self.cache.add(block, content, parent)
        if self._checksum is not None and self._is_sampled():
            block.checksum = self._checksum([block.block_id])[0]
            if self.pages is not None:
                self.pages.keep_checksum(block)
        if is_pinned:
            self._pin(block, content.fields.tenant)

    def _is_sampled(self) -> bool:
        """Spread evenly, so that a share of one in ten is every tenth block."""
        self._checksum_credit += self._config.checksum_blocks
        if self._checksum_credit < 1.0:
            return False
        self._checksum_credit -= 1.0
        return True

    def _can_pin(self, tenant: bytes | None) -> bool:
        if self.pages is not None and self.num_pinned >= self.pages.max_pinned:
            return False
        of_tenant = self._num_pinned_of.get(tenant, 0)
        return (
            self.num_pinned < self._config.max_pinned_blocks and of_tenant < self._config.max_pinned_blocks_per_tenant
        )

    def _pin(self, block: Block, tenant: bytes | None) -> None:
        block.is_pinned = True
        self._num_pinned_of[tenant] = self._num_pinned_of.get(tenant, 0) + 1
        if self.pages is not None:
            self.pages.note_pinned(block)

    def _pin_again(self, block: Block) -> None:
        """A template that was withdrawn and has come back while its blocks were still cached."""
        fields = block.content.fields if block.content is not None else None
        if fields is not None and fields.scope <= Scope.TEMPLATE and self._can_pin(fields.tenant):
            self._pin(block, fields.tenant)

    def count_pinned(self, keys: Sequence[BlockKey]) -> int:
        """Leading keys of a chain whose blocks are pinned."""
        blocks = (self.cache.find(key) for key in keys)
        return sum(1 for _ in takewhile(lambda block: block is not None and block.is_pinned, blocks))

    def keep_pins(self, keys: Set[BlockKey]) -> int:
        """Makes the other pinned blocks evictable again; returns how many that were."""
        outdated = [block for block in self.cache.published() if block.is_pinned and not _has_key(block, keys)]
        for block in reversed(outdated):  # published after its parent, a block must be evicted before it
            self._drop_pin(block)
            if block.block_id in self._idle_pinned:
                self._idle_pinned.discard(block.block_id)
                self._evictable[block.block_id] = None
        return len(outdated)

    # --- removal

    def purge(self, user_hash: bytes, oldest_live_serial: int) -> int:
        """Ends all reuse of a user's blocks; their bytes are zeroed before reuse. Returns how many were removed.

        What this user wrote under shared values goes too; TEMPLATE and PUBLIC blocks are no user's. What others wrote
        there stays for them, and this user no longer finds it. Blocks in use are only unpublished: their sequences go
        on. Requests that arrived before can no longer publish for this user.
        """
        self.cache.entomb(user_hash, oldest_live_serial)
        num_removed = 0
        for block in self.blocks:
            content = block.content
            if not _is_of_user(block, user_hash):
                continue
            block.must_zero = True  # when in use: on release
            if content is not None:
                num_removed += 1
                self._unpublish(block)
            elif block.ref_count == 0:
                self._mark_for_zeroing(block)
        if self.pages is not None:
            self.pages.purge(user_hash)
        return num_removed

    def expire(self, oldest_use_s: Mapping[Scope, float]) -> int:
        """Drops blocks of these scopes that were last used before so long (same clock as `now_s`)."""
        expired = [
            block
            for block in (self.blocks[block_id] for block_id in self._evictable)
            if block.content and block.last_used_s < oldest_use_s.get(block.content.fields.scope, -math.inf)
        ]
        for block in expired:
            self._unpublish(block)
        return len(expired)

    def clear(self) -> None:
        """Forgets every published block, pinned ones too: the weights or the secret changed."""
        self.cache.clear()
        for block in self.blocks:
            block.is_pinned = False
        self._num_pinned_of.clear()
        idle = [*self._evictable, *self._idle_pinned]
        self._evictable.clear()
        self._idle_pinned.clear()
        for block_id in idle:
            self._retire(self.blocks[block_id])

    def drain_zeroing(self) -> list[int]:
        """Blocks whose bytes must be overwritten before the next step."""
        block_ids, self._to_zero = self._to_zero, []
        return block_ids if self.pages is None else [*block_ids, *self.pages.drain_zeroing()]

    def drain_stale(self) -> list[int]:
        """Blocks whose bytes nobody may read: freed or newly allocated since the last call, and not written since."""
        stale, self._stale = self._stale, set()
        blocks = (self.blocks[block_id] for block_id in sorted(stale))
        ids = [
            block.block_id for block in blocks if block.content is None and not (block.ref_count and block.num_written)
        ]
        return ids if self.pages is None else [*ids, *self.pages.drain_stale()]

    # --- places

    def _retire(self, block: Block) -> None:
        """Puts a block without references where it belongs."""
        if block.content is None:
            if block.must_zero:
                self._mark_for_zeroing(block)
            self._free.append(block.block_id)
            self._stale.add(block.block_id)
        elif block.is_pinned:
            self._idle_pinned.add(block.block_id)
        else:
            self._evictable[block.block_id] = None

    def _enter_use(self, block: Block) -> None:
        self.lives[block.block_id] = block.generation
        self.num_in_use += 1

    def _mark_for_zeroing(self, block: Block) -> None:
        self._to_zero.append(block.block_id)
        block.must_zero = False
        block.user_hash = None

    def _leave_cached(self, block: Block) -> None:
        if block.is_pinned:
            self._idle_pinned.remove(block.block_id)
        else:
            del self._evictable[block.block_id]

    def _evict(self) -> Block:
        block = self.blocks[next(iter(self._evictable))]
        del self._evictable[block.block_id]
        self._log.record(BlockAction.EVICT, block, block.owner)
        self.cache.counters.evictions += 1
        self.cache.remove(block)
        return block

    def _unpublish(self, block: Block) -> None:
        if block.is_pinned:
            self._drop_pin(block)
            self._idle_pinned.discard(block.block_id)
        self.cache.remove(block)
        if block.ref_count == 0:
            self._evictable.pop(block.block_id, None)
            self._retire(block)

    def _drop_pin(self, block: Block) -> None:
        assert block.content is not None
        block.is_pinned = False
        self._num_pinned_of[block.content.fields.tenant] -= 1
        if self.pages is not None:
            self.pages.note_unpinned(block)


def _has_key(block: Block, keys: Set[BlockKey]) -> bool:
    return block.content is not None and block.content.key in keys


def _is_of_user(block: Block, user_hash: bytes) -> bool:
    """Written for the user or anyone nested below, or keyed to the user."""
    return block.user_hash == user_hash or (block.content is not None and block.content.fields.user == user_hash)
