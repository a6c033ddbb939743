"""Who is asking, as established by the credential and only narrowed by the request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.api.ids import TenantId, UserId


class Role(Enum):
    USER = "user"  # the key is that user; a user named in the body nests below it
    DELEGATE = "delegate"  # a trusted back end: may name any user of its tenant
    OPERATOR = "operator"  # runs the service: metrics, templates, public scope


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. `user_path` nests: ("alice",) or ("alice", "sub"); it never holds another key's user."""

    tenant: TenantId
    roles: frozenset[Role]
    key_id: str
    user_path: tuple[UserId, ...]

    @property
    def is_operator(self) -> bool:
        return Role.OPERATOR in self.roles

    @property
    def is_delegate(self) -> bool:
        return Role.DELEGATE in self.roles
