"""How far blocks may be shared: by tenant, by template and by request; each can only narrow the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from cluster.api.errors import InvalidRequestError


class Share(Enum):
    """From narrow to wide."""

    NONE = "none"  # nothing is reused, not even by the same user
    USER = "user"  # only by the same user
    TEMPLATE = "template"  # also the blocks that depend on the template alone
    VARIABLES = "variables"  # also the blocks that depend on shared variables

    @property
    def width(self) -> int:
        return tuple(Share).index(self)


class Granularity(Enum):
    """Where a shared run may end: at the last full block that ends at or before such a boundary."""

    BLOCK = "block"
    SENTENCE = "sentence"
    PARAGRAPH = "paragraph"
    TEMPLATE = "template"  # all of the template or nothing


def narrowest(*shares: Share | None) -> Share:
    """None means: no opinion."""
    return min((share for share in shares if share is not None), key=lambda share: share.width)


_Named = TypeVar("_Named", Share, Granularity)


def parse_choice(kind: type[_Named], value: object, param: str) -> _Named:
    """Raises InvalidRequestError that lists what is allowed."""
    for member in kind:
        if member.value == value:
            return member
    allowed = ", ".join(member.value for member in kind)
    raise InvalidRequestError(f"{param} must be one of {allowed}; got {repr(value)[:40]}", param=param)


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """The operator's word: how far a tenant may share at most. `tenants` maps tenant hashes; others get `default`."""

    default: Share = Share.VARIABLES
    tenants: Mapping[bytes, Share] = field(default_factory=dict)

    def of(self, tenant: bytes) -> Share:
        return self.tenants.get(tenant, self.default)

    def may_use_templates_of(self, owner: bytes | None) -> bool:
        """Whether anybody may be granted the blocks of this owner's templates (None: of public ones)."""
        shares = (self.default, *self.tenants.values()) if owner is None else (self.of(owner),)
        return any(share.width >= Share.TEMPLATE.width for share in shares)
