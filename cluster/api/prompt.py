"""A prompt between the front door and the engine: what was asked for, and the tokens with their scopes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.api.scope import ScopeFields, ScopeSpan


@dataclass(frozen=True, slots=True)
class PromptRef:
    """A registered prompt template, named as OpenAI's API does. `version` None means the latest."""

    id: str
    version: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """Hashed identity of one request, made by the gateway from the principal and the narrowing fields of the body.

    `private` are the fields of everything that belongs to this caller alone: scope USER or SESSION.
    """

    tenant: bytes
    user: bytes
    private: ScopeFields
    account: bytes | None = None  # the outermost user, whom a purge names; None: `user` is not nested


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """Token ids of the whole prompt and the scope of each part; the last span is unbounded.

    `use_prefix_cache` is False when policy or request say that nothing may be reused: it belongs into the Request.
    """

    token_ids: tuple[int, ...]
    spans: tuple[ScopeSpan, ...]
    use_prefix_cache: bool = True
