"""One API key: `id.secret` in the caller's hand, id and SHA-256 of the secret in ours."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from cluster.api.errors import InvalidRequestError
from cluster.api.ids import TenantId, UserId
from cluster.api.principal import Principal, Role

_ID_BYTES = 8
_SECRET_BYTES = 32
_FIELDS = frozenset({"id", "sha256", "tenant", "roles", "user", "created_unix_s"})


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """`user` is set for keys that are one user's own. A secret has 256 random bits: a plain hash of it is enough."""

    id: str
    sha256: str
    tenant: str
    roles: frozenset[Role]
    user: str | None
    created_unix_s: int

    def to_principal(self) -> Principal:
        path = () if self.user is None else (UserId(self.user),)
        return Principal(tenant=TenantId(self.tenant), roles=self.roles, key_id=self.id, user_path=path)

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "sha256": self.sha256,
            "tenant": self.tenant,
            "roles": sorted(role.value for role in self.roles),
            "user": self.user,
            "created_unix_s": self.created_unix_s,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KeyRecord:
        """Raises InvalidRequestError for a record that is not one; it never falls back to wider rights."""
        if not isinstance(data, dict) or set(data) != _FIELDS:
            raise InvalidRequestError(f"a key record must have exactly the fields {sorted(_FIELDS)}")
        try:
            roles = frozenset(Role(role) for role in data["roles"])
        except (TypeError, ValueError):
            raise InvalidRequestError(f"key {data['id']!r} has an unknown role") from None
        if (data["user"] is not None) and roles & {Role.DELEGATE, Role.OPERATOR}:
            raise InvalidRequestError(f"key {data['id']!r} is one user's and must have no other role")
        return cls(data["id"], data["sha256"], data["tenant"], roles, data["user"], data["created_unix_s"])


def new_id() -> str:
    return f"ww-{secrets.token_hex(_ID_BYTES)}"


def new_secret() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def hash_secret(secret: str) -> str:
    return sha256(secret.encode("utf-8", errors="surrogatepass")).hexdigest()
