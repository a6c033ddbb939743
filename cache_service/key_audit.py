"""Does a block's key depend on all that it must? Asked of a live key derivation, by changing one field at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

from cache_service.block_key import BlockKeyer
from cluster.api.ids import BlockKey
from cluster.api.scope import Scope, ScopeFields

_FIELDS = ScopeFields(
    Scope.SESSION,
    tenant=b"T" * 32,
    template=b"P" * 32,
    variables=b"V" * 32,
    user=b"U" * 32,
    session=b"S" * 32,
    salt=b"s",
)
_ADAPTER = b"L" * 32
_PARENT = BlockKey(b"K" * 32)


def missing_fields(keyer: BlockKeyer) -> tuple[str, ...]:
    """Names of what can change without changing the key; empty for a complete key."""
    original = keyer.child(_PARENT, _FIELDS, _tokens(keyer), _ADAPTER)
    return tuple(name for name, key in _changed(keyer) if key == original)


def fixed_chain_digest(keyer: BlockKeyer) -> bytes:
    """Equal for two derivations with the same secret, model and code."""
    tokens = _tokens(keyer)
    first = keyer.child(None, _FIELDS, tokens)
    second = keyer.child(first, replace(_FIELDS, scope=Scope.USER, session=None, salt=None), tokens, _ADAPTER)
    return blake2b(first + second, digest_size=16).digest()


def _tokens(keyer: BlockKeyer) -> tuple[int, ...]:
    return tuple(range(100, 100 + keyer.block_size))


def _changed(keyer: BlockKeyer) -> Iterator[tuple[str, BlockKey]]:
    tokens = _tokens(keyer)
    yield "scope", keyer.child(_PARENT, replace(_FIELDS, scope=Scope.USER), tokens, _ADAPTER)
    for name in ("tenant", "template", "variables", "user", "session", "salt"):
        for value in (b"another", None):
            fields = replace(_FIELDS, **{name: value})  # type: ignore[arg-type]  # none of these is the scope
            yield name, keyer.child(_PARENT, fields, tokens, _ADAPTER)
    yield "adapter", keyer.child(_PARENT, _FIELDS, tokens, b"another")
    yield "adapter", keyer.child(_PARENT, _FIELDS, tokens, None)
    yield "parent", keyer.child(BlockKey(b"k" * 32), _FIELDS, tokens, _ADAPTER)
    yield "parent", keyer.child(None, _FIELDS, tokens, _ADAPTER)
    yield "first token", keyer.child(_PARENT, _FIELDS, (0, *tokens[1:]), _ADAPTER)
    yield "last token", keyer.child(_PARENT, _FIELDS, (*tokens[:-1], 0), _ADAPTER)
