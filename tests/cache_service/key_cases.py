"""Inputs of the golden vectors. Also run as a script, by a process with another PYTHONHASHSEED: prints the keys."""

from __future__ import annotations

from dataclasses import replace

from cache_service.block_key import BlockKeyer, ModelIdentity
from cluster.api.ids import BlockKey
from cluster.api.scope import Scope, ScopeFields, ScopeSpan

SECRET = bytes(range(32))
MODEL = ModelIdentity("smollm2-135m", b"\x01" * 32, "bfloat16", "paged-16", 16)
TOKENS = tuple(range(100, 116))
USER = ScopeFields(Scope.USER, tenant=b"T" * 32, template=b"P" * 32, variables=b"V" * 32, user=b"U" * 32)


def keyer(secret: bytes = SECRET, **model: object) -> BlockKeyer:
    return BlockKeyer(secret, replace(MODEL, **model))  # type: ignore[arg-type]


def golden_keys() -> dict[str, bytes]:
    """One key of each kind that the system derives."""
    ours = keyer()
    public = ScopeFields(Scope.PUBLIC, tenant=None, template=b"P" * 32)
    template = ScopeFields(Scope.TEMPLATE, tenant=b"T" * 32, template=b"P" * 32)
    variables = replace(template, scope=Scope.VARIABLES, variables=b"V" * 32)
    session = replace(USER, scope=Scope.SESSION, session=b"S" * 32)
    first = ours.child(None, USER, TOKENS)
    spans = (ScopeSpan(1, template), ScopeSpan(None, USER))
    return {
        "public": ours.child(None, public, TOKENS),
        "template": ours.child(None, template, TOKENS),
        "variables": ours.child(None, variables, TOKENS),
        "user": first,
        "user, second block": ours.child(first, USER, TOKENS),
        "user, salted": ours.child(None, replace(USER, salt=b"grain"), TOKENS),
        "user, empty salt": ours.child(None, replace(USER, salt=b""), TOKENS),
        "user, adapter": ours.child(None, USER, TOKENS, b"L" * 32),
        "session": ours.child(None, session, TOKENS),
        "parent of zeros": ours.child(BlockKey(bytes(32)), USER, TOKENS),
        "large token ids": ours.child(None, USER, tuple(range(2**32 - 16, 2**32))),
        "two spans": ours.prompt_keys(TOKENS * 2 + (1, 2, 3), spans)[1],
        "identity": ours.identity("user", "acme", "alice", "nested"),
        "identity, unicode": ours.identity("user", "acme", "愛麗絲"),
        "digest": ours.digest("template", b"Hello {{ name }}"),
    }


if __name__ == "__main__":
    for name, value in golden_keys().items():
        print(f'    "{name}": "{value.hex()}",')
