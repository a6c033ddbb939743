"""The key of a KV block: one function for gateway, router, engine and tests.

A key is a keyed 256-bit BLAKE2b over typed, length-prefixed fields with a schema version, chained through the parent's
key. It does not depend on the process, the machine or PYTHONHASHSEED; golden vectors pin it. A key is a name, not a
proof: the engine compares tokens, scope fields and the parent's identity on every hit (see workers/block_pool.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from cluster.api.ids import BlockKey, PrincipalHash
from cluster.api.scope import Scope, ScopeFields, ScopeSpan

SCHEMA_VERSION = 1
KEY_BYTES = 32

# Domain separation: a hash made for one purpose can never equal one made for another.
_PERSON_BLOCK = b"ww-block"
_PERSON_IDENTITY = b"ww-identity"
_PERSON_TEXT = b"ww-text"


def encode_field(tag: int, value: bytes | None) -> bytes:
    """One typed field: tag (u8), presence (u8), length (u32), bytes. So absent ≠ empty and ("a","bc") ≠ ("ab","c")."""
    if value is None:
        return struct.pack("<BBI", tag, 0, 0)
    return struct.pack("<BBI", tag, 1, len(value)) + value


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What makes KV bytes interchangeable: same weights, dtype, layout and block size."""

    model: str
    weights_digest: bytes
    dtype: str
    kv_layout: str
    block_size_tokens: int

    def encode(self) -> bytes:
        return b"".join(
            (
                encode_field(1, self.model.encode()),
                encode_field(2, self.weights_digest),
                encode_field(3, self.dtype.encode()),
                encode_field(4, self.kv_layout.encode()),
                encode_field(5, struct.pack("<I", self.block_size_tokens)),
            )
        )


class BlockKeyer:
    """Derives identities and block keys. `secret` is the cluster secret (≥ 32 bytes); rotating it empties the cache."""

    def __init__(self, secret: bytes, model: ModelIdentity) -> None:
        self.model = model
        self.block_size = model.block_size_tokens
        self._secret = _stretched(secret)
        self._model_bytes = model.encode()
        self._header_cache: dict[tuple[ScopeFields, bytes | None], bytes] = {}

    def identity(self, kind: str, *parts: str) -> PrincipalHash:
        """Keyed hash of a typed, possibly nested id: identity("user", tenant, "alice", "sub")."""
        return _identity(self._secret, kind, parts)

    def digest(self, kind: str, *parts: bytes) -> bytes:
        """Keyed hash of content: a template's source, the values of variables."""
        message = encode_field(0, kind.encode()) + b"".join(encode_field(1, part) for part in parts)
        return self._hash(_PERSON_TEXT, message)

    def child(
        self,
        parent: BlockKey | None,
        fields: ScopeFields,
        token_ids: Sequence[int],
        adapter_digest: bytes | None = None,
    ) -> BlockKey:
        """Key of the full block `token_ids` (length block_size) that follows `parent` (None at the start)."""
        assert len(token_ids) == self.block_size
        tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
        message = self._header(fields, adapter_digest) + encode_field(20, parent) + encode_field(21, tokens)
        return BlockKey(self._hash(_PERSON_BLOCK, message))

    def prompt_keys(
        self, token_ids: Sequence[int], spans: Sequence[ScopeSpan], adapter_digest: bytes | None = None
    ) -> tuple[BlockKey, ...]:
        """Keys of all full blocks of a prompt, each under the fields of the span it lies in."""
        keys: list[BlockKey] = []
        parent: BlockKey | None = None
        num_full = len(token_ids) // self.block_size
        for index, fields in zip(range(num_full), fields_per_block(spans), strict=False):
            start = index * self.block_size
            parent = self.child(parent, fields, token_ids[start : start + self.block_size], adapter_digest)
            keys.append(parent)
        return tuple(keys)

    def _header(self, fields: ScopeFields, adapter_digest: bytes | None) -> bytes:
        cached = self._header_cache.get((fields, adapter_digest))
        if cached is not None:
            return cached
        header = b"".join(
            (
                struct.pack("<H", SCHEMA_VERSION),
                self._model_bytes,
                encode_field(9, adapter_digest),
                encode_field(10, bytes([fields.scope])),
                encode_field(11, fields.tenant),
                encode_field(12, fields.template),
                encode_field(13, fields.variables),
                encode_field(14, fields.user),
                encode_field(15, fields.session),
                encode_field(16, fields.salt),
            )
        )
        if len(self._header_cache) > 4096:
            self._header_cache.clear()
        self._header_cache[fields, adapter_digest] = header
        return header

    def _hash(self, person: bytes, message: bytes) -> bytes:
        return _keyed_hash(self._secret, person, message)


def identity(secret: bytes, kind: str, *parts: str) -> PrincipalHash:
    """`BlockKeyer.identity` for whoever does not know the model yet: identities do not depend on it."""
    return _identity(_stretched(secret), kind, parts)


def _stretched(secret: bytes) -> bytes:
    if len(secret) < KEY_BYTES:
        raise ValueError(f"cluster secret has {len(secret)} bytes, needs at least {KEY_BYTES}")
    return blake2b(secret, digest_size=64).digest()


def _identity(key: bytes, kind: str, parts: Iterable[str]) -> PrincipalHash:
    message = encode_field(0, kind.encode()) + b"".join(encode_field(1, part.encode()) for part in parts)
    return PrincipalHash(_keyed_hash(key, _PERSON_IDENTITY, message))


def _keyed_hash(key: bytes, person: bytes, message: bytes) -> bytes:
    return blake2b(message, digest_size=KEY_BYTES, key=key, person=person).digest()


def fields_per_block(spans: Iterable[ScopeSpan]) -> Iterator[ScopeFields]:
    """The scope fields of block 0, 1, 2 …; endless, because the last span covers the output too.

    Raises ValueError when scopes widen along the prompt or the last span is bounded.
    """
    widest = Scope.PUBLIC
    last: ScopeSpan | None = None
    for span in spans:
        if span.fields.scope < widest:
            raise ValueError(f"scope widens from {widest.name} to {span.fields.scope.name} along the prompt")
        widest = span.fields.scope
        last = span
        if span.num_blocks is None:
            while True:
                yield span.fields
        for _ in range(span.num_blocks):
            yield span.fields
    raise ValueError(f"the last span must be unbounded, got {last}")
