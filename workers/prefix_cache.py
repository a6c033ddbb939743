"""Which published block goes by which key, and the proof that it is the block that was asked for.

A key match alone is never enough: tokens, scope fields, adapter and the identity of the verified parent are compared
on every hit. So a colliding hash costs reuse, never isolation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from cache_service.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from cluster.api.ids import BlockKey
from cluster.api.scope import Scope
from workers.block import Block, BlockContent, BlockIdentity, BlockWriter

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CacheCounters:
    """In blocks, since start. `verify_failures`: a key led to a block with other content."""

    hits: int = 0
    misses: int = 0
    verify_failures: int = 0
    checksum_failures: int = 0
    publish_conflicts: int = 0  # a block's key was taken by other content; the block stayed private
    late_publications: int = 0  # refused by a tombstone
    evictions: int = 0
    hits_by_scope: dict[Scope, int] = field(default_factory=lambda: dict.fromkeys(Scope, 0))


class PrefixCache:
    """Maps keys to blocks. Does not know free lists or reference counts."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self._index: dict[BlockKey, int] = {}
        # In order, runs of one kind joined. None: all blocks were cleared.
        self._events: list[tuple[type[BlockStored] | type[BlockRemoved] | None, list[BlockKey]]] = []
        self._tombstones: dict[bytes, int] = {}  # user hash -> serial of the purge
        self._forgotten: dict[bytes, int] = {}  # the same, for as long as blocks from before that purge can be found
        self._cleared_serial = 0
        self.serial = 1  # grows with every purge
        self.counters = CacheCounters()
        self.is_sharing = True
        self.on_retract: Callable[[Block], None] | None = None  # told of each block that can no longer be found

    def __len__(self) -> int:
        return len(self._index)

    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._index)

    def published(self) -> Iterator[Block]:
        """Every block that can be found, in the order of publication."""
        return (self._blocks[block_id] for block_id in self._index.values())

    def find(self, key: BlockKey) -> Block | None:
        """The block published under `key`, unverified."""
        block_id = self._index.get(key)
        return None if block_id is None else self._blocks[block_id]

    def matches(self, block: Block, wanted: BlockContent, parent: BlockIdentity | None) -> bool:
        """True when `block` is what `wanted` describes and follows the very block `parent`."""
        held = block.content
        return (
            held is not None
            and held.token_ids == wanted.token_ids
            and held.fields == wanted.fields
            and held.adapter_digest == wanted.adapter_digest
            and block.parent == parent
        )

    def match(self, wanted: Iterable[BlockContent], user_hash: bytes) -> tuple[list[Block], bool]:
        """The longest verified run of published blocks, and whether verification (not absence) ended it.

        A purged user finds nothing from before the purge, whoever wrote it, but what is no user's.
        """
        found: list[Block] = []
        parent: BlockIdentity | None = None
        if not self.is_sharing:
            return found, False
        forgotten = self._forgotten.get(user_hash, 0)
        for content in wanted:
            block = self.find(content.key)
            if block is None:
                return found, False
            if block.published_serial <= forgotten and content.fields.scope > Scope.TEMPLATE:
                return found, False
            if not self.matches(block, content, parent):
                return found, True
            found.append(block)
            parent = block.identity
        return found, False

    def note_lookup(self, hits: Iterable[Block], num_wanted: int, is_mismatch: bool) -> None:
        """Counts one admission's lookup. Apart from `match`, which a blocked queue head repeats every step."""
        num_hits = 0
        for block in hits:
            assert block.content is not None
            self.counters.hits_by_scope[block.content.fields.scope] += 1
            num_hits += 1
        self.counters.hits += num_hits
        self.counters.misses += num_wanted - num_hits
        if is_mismatch:
            self.counters.verify_failures += 1
            _log.warning("prefix cache: a key led to a block with other content; treated as a miss")

    def may_publish(self, content: BlockContent, parent: BlockIdentity | None, writer: BlockWriter) -> bool:
        """Refuses what is too late, too wide, or hangs on a parent that can no longer be found."""
        if not self.is_sharing:
            return False
        if self.is_entombed(writer) or writer.serial <= self._cleared_serial:
            self.counters.late_publications += 1
            return False
        if content.fields.scope <= Scope.TEMPLATE and not writer.is_warm_up:
            return False  # whether a template hits must not depend on what other users did
        return parent is None or self._is_published(parent)

    def add(self, block: Block, content: BlockContent, parent: BlockIdentity | None) -> None:
        assert content.key not in self._index
        assert block.content is None
        block.content = content
        block.parent = parent
        block.published_serial = self.serial
        self._index[content.key] = block.block_id
        self._announce(BlockStored, content.key)

    def remove(self, block: Block) -> None:
        """From now on the block cannot be found. Its bytes are untouched."""
        assert block.content is not None
        key = block.content.key
        assert self._index[key] == block.block_id
        del self._index[key]
        self._retract(block)
        self._announce(BlockRemoved, key)

    def entomb(self, user_hash: bytes, oldest_live_serial: int) -> None:
        """Whatever arrived up to now for this user may not publish any more."""
        self._tombstones = {user: serial for user, serial in self._tombstones.items() if serial >= oldest_live_serial}
        self._tombstones[user_hash] = self.serial
        oldest = min((block.published_serial for block in self.published()), default=self.serial)
        self._forgotten = {user: serial for user, serial in self._forgotten.items() if serial >= oldest}
        self._forgotten[user_hash] = self.serial
        self.serial += 1

    def is_entombed(self, writer: BlockWriter) -> bool:
        """Whether the writer's user was purged after the writer's request arrived."""
        return bool(self._tombstones) and writer.serial <= self._tombstones.get(writer.user_hash, 0)

    def clear(self) -> None:
        for block_id in self._index.values():
            self._retract(self._blocks[block_id])
        self._index.clear()
        self._events = [(None, [])]  # what came before no longer matters
        self._cleared_serial = self.serial
        self.serial += 1

    def drain_events(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return [kind(tuple(keys)) if kind is not None else AllBlocksCleared() for kind, keys in events]

    def _retract(self, block: Block) -> None:
        block.content = block.parent = block.checksum = None
        block.is_retracted = block.ref_count > 0
        if self.on_retract is not None:
            self.on_retract(block)

    def _is_published(self, identity: BlockIdentity) -> bool:
        block = self._blocks[identity.block_id]
        return block.generation == identity.generation and block.content is not None

    def _announce(self, kind: type[BlockStored] | type[BlockRemoved], key: BlockKey) -> None:
        if self._events and self._events[-1][0] is kind:
            self._events[-1][1].append(key)
        else:
            self._events.append((kind, [key]))
