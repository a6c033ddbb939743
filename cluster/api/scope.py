"""Who may read a cached block. From wide to narrow; along one prompt the scope only ever narrows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Scope(IntEnum):
    """Order is width: a smaller value is shared more widely."""

    PUBLIC = 0  # a template that the operator declared public, across tenants
    TEMPLATE = 1  # depends on the template alone; within the tenant
    VARIABLES = 2  # depends also on shareable variables; within the tenant, same values
    USER = 3  # everything else; never leaves the user
    SESSION = 4  # as USER, plus the session id


@dataclass(frozen=True, slots=True)
class ScopeFields:
    """The typed identity fields of a block key. Absent (None) differs from empty.

    Hashes are keyed with the cluster secret (32 bytes). `tenant` is None only for PUBLIC;
    `user` is set for USER and SESSION, `session` for SESSION, `salt` only for USER and SESSION.
    """

    scope: Scope
    tenant: bytes | None
    template: bytes | None = None
    variables: bytes | None = None
    user: bytes | None = None
    session: bytes | None = None
    salt: bytes | None = None


@dataclass(frozen=True, slots=True)
class ScopeSpan:
    """`num_blocks` leading full blocks (after those of earlier spans) that carry `fields`.

    The last span of a request has `num_blocks=None`: it covers the rest of the prompt and all output.
    """

    num_blocks: int | None
    fields: ScopeFields
