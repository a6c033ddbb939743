"""One physical KV block as the pool sees it: who holds it, what is in it, and under which name it may be found."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.ids import BlockKey, RequestId
from cluster.api.scope import ScopeFields


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """A block in one of its lives. The generation counts reuses, so an identity never names other content."""

    block_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a full block is published and looked up by. The key is a name; the rest is compared."""

    key: BlockKey
    token_ids: tuple[int, ...]
    fields: ScopeFields
    adapter_digest: bytes | None


@dataclass(frozen=True, slots=True)
class BlockWriter:
    """On whose behalf blocks are allocated and published."""

    request_id: RequestId
    user_hash: bytes
    serial: int  # the pool's purge serial when the request arrived; older than a purge = too late to publish
    is_warm_up: bool = False  # may write, and pins, PUBLIC and TEMPLATE blocks


@dataclass(slots=True)
class Block:
    """Mutable state of one block. `content` is set exactly while the block can be found in the prefix cache."""

    block_id: int
    generation: int = 0
    ref_count: int = 0
    owner: RequestId | None = None  # the request that may write it; kept after release, for the event log
    user_hash: bytes | None = None  # whose tokens the bytes may hold
    num_written: int = 0  # leading slots written in this generation
    content: BlockContent | None = None
    parent: BlockIdentity | None = None  # the block before it; None for the first of a prompt
    is_retracted: bool = False  # was published in this life and then withdrawn while in use
    is_pinned: bool = False
    must_zero: bool = False  # overwrite before anyone else gets it
    last_used_s: float = 0.0
    published_serial: int = 0  # the pool's purge serial when it was published
    checksum: int | None = None

    @property
    def identity(self) -> BlockIdentity:
        return BlockIdentity(self.block_id, self.generation)
