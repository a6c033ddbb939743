"""Faults of block keys. A key alone decides nothing, since every hit is verified, so each of these (but the constant
hash, which shows the verification at work) leaves the same field out of the verification as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cache_service.block_key import BlockKeyer
from cluster.api.ids import BlockKey
from cluster.api.scope import ScopeFields
from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.targets.stack import StackParts
from workers.block import Block, BlockContent, BlockIdentity
from workers.block_pool import BlockPool, ChecksumBlocks
from workers.build import EngineParts
from workers.config import EngineConfig
from workers.event_log import BlockEventLog
from workers.prefix_cache import PrefixCache

_NUM_COMPARED = 8


class KeyerWithout(BlockKeyer):
    """Leaves something of the scope out of every key."""

    @staticmethod
    def narrowed(fields: ScopeFields) -> ScopeFields:
        raise NotImplementedError

    def child(
        self,
        parent: BlockKey | None,
        fields: ScopeFields,
        token_ids: Sequence[int],
        adapter_digest: bytes | None = None,
    ) -> BlockKey:
        return super().child(parent, self.narrowed(fields), token_ids, adapter_digest)


class KeyerWithoutUser(KeyerWithout):
    @staticmethod
    def narrowed(fields: ScopeFields) -> ScopeFields:
        return replace(fields, user=None)


class KeyerWithoutVariables(KeyerWithout):
    @staticmethod
    def narrowed(fields: ScopeFields) -> ScopeFields:
        return replace(fields, variables=None)


class KeyerWithoutParent(BlockKeyer):
    def child(
        self,
        parent: BlockKey | None,
        fields: ScopeFields,
        token_ids: Sequence[int],
        adapter_digest: bytes | None = None,
    ) -> BlockKey:
        return super().child(None, fields, token_ids, adapter_digest)


class KeyerOfFirstTokens(BlockKeyer):
    def child(
        self,
        parent: BlockKey | None,
        fields: ScopeFields,
        token_ids: Sequence[int],
        adapter_digest: bytes | None = None,
    ) -> BlockKey:
        first = list(token_ids[:_NUM_COMPARED]) + [0] * (len(token_ids) - _NUM_COMPARED)
        return super().child(parent, fields, first, adapter_digest)


class ConstantKeyer(BlockKeyer):
    """The worst hash: all blocks go by one key. Verification must make misses of all of them."""

    def child(
        self,
        parent: BlockKey | None,
        fields: ScopeFields,
        token_ids: Sequence[int],
        adapter_digest: bytes | None = None,
    ) -> BlockKey:
        return BlockKey(bytes(32))


class CacheWithoutUser(PrefixCache):
    def matches(self, block: Block, wanted: BlockContent, parent: BlockIdentity | None) -> bool:
        held = block.content
        if held is not None:
            wanted = replace(wanted, fields=replace(wanted.fields, user=held.fields.user))
        return super().matches(block, wanted, parent)


class CacheWithoutVariables(PrefixCache):
    def matches(self, block: Block, wanted: BlockContent, parent: BlockIdentity | None) -> bool:
        held = block.content
        if held is not None:
            wanted = replace(wanted, fields=replace(wanted.fields, variables=held.fields.variables))
        return super().matches(block, wanted, parent)


class CacheWithoutParent(PrefixCache):
    def matches(self, block: Block, wanted: BlockContent, parent: BlockIdentity | None) -> bool:
        return super().matches(block, wanted, block.parent)


class CacheOfFirstTokens(PrefixCache):
    def matches(self, block: Block, wanted: BlockContent, parent: BlockIdentity | None) -> bool:
        held = block.content
        if held is not None and held.token_ids[:_NUM_COMPARED] == wanted.token_ids[:_NUM_COMPARED]:
            wanted = replace(wanted, token_ids=held.token_ids)
        return super().matches(block, wanted, parent)


def _pool_with(cache: type[PrefixCache]) -> type[BlockPool]:
    class Pool(BlockPool):
        def __init__(self, config: EngineConfig, log: BlockEventLog, checksum: ChecksumBlocks | None = None) -> None:
            super().__init__(config, log, checksum)
            self.cache = cache(self.blocks)

    return Pool


def with_keys(keyer: type[BlockKeyer], cache: type[PrefixCache]) -> Callable[[], StackParts]:
    return lambda: StackParts(engine=EngineParts(block_pool=_pool_with(cache)), keyer=keyer)


FAULTS = (
    Fault(
        "prefix_of_first_tokens",
        Component.KEY,
        f"only the first {_NUM_COMPARED} tokens of a block are compared",
        with_keys(KeyerOfFirstTokens, CacheOfFirstTokens),
    ),
    Fault("key_without_user", Component.KEY, "keys leave the user out", with_keys(KeyerWithoutUser, CacheWithoutUser)),
    Fault(
        "key_without_variables",
        Component.KEY,
        "keys leave the template's variables out",
        with_keys(KeyerWithoutVariables, CacheWithoutVariables),
    ),
    Fault(
        "key_without_parent",
        Component.KEY,
        "keys leave the parent out",
        with_keys(KeyerWithoutParent, CacheWithoutParent),
    ),
    Fault("constant_hash", Component.KEY, "all blocks have one key", lambda: StackParts(keyer=ConstantKeyer)),
)
