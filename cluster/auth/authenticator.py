"""Credential -> Principal. Used by both transports before anything else is looked at."""

from __future__ import annotations

import hmac
from pathlib import Path

from cluster.api.errors import AuthenticationError
from cluster.api.ids import TenantId
from cluster.api.principal import Principal, Role
from cluster.auth.key_record import hash_secret
from cluster.auth.key_store import KeyStore
from cluster.auth.names import DEFAULT_TENANT

ANONYMOUS = Principal(
    tenant=TenantId(DEFAULT_TENANT),
    roles=frozenset({Role.OPERATOR, Role.DELEGATE}),
    key_id="anonymous",
    user_path=(),
)

# Compared with when the id is unknown, so that a wrong id takes as long as a wrong secret.
_NO_HASH = hash_secret("")


class Authenticator:
    """`allow_anonymous` is decided by the assembly (loopback only). It has no effect once keys are configured."""

    def __init__(self, keys_path: Path | None, *, allow_anonymous: bool) -> None:
        self._store = None if keys_path is None else KeyStore(keys_path)
        self._allow_anonymous = allow_anonymous

    @property
    def is_open(self) -> bool:
        """True while callers without a key are let in as operator and delegate of the default tenant."""
        return self._allow_anonymous and (self._store is None or not self._store.is_configured)

    @property
    def load_error(self) -> str | None:
        """Why the key file could not be read; the last good keys stay in force."""
        return None if self._store is None else self._store.load_error

    def authenticate(self, authorization: str | None) -> Principal:
        """`authorization` as in HTTP: "Bearer id.secret". Raises AuthenticationError."""
        if self.is_open:
            return ANONYMOUS
        if not authorization:
            raise AuthenticationError("no API key was given: send 'Authorization: Bearer KEY'", code="missing_api_key")
        scheme, _, credential = authorization.partition(" ")
        key_id, dot, secret = credential.strip().partition(".")
        if scheme.lower() != "bearer" or not dot:
            raise AuthenticationError("the API key is malformed: send 'Authorization: Bearer ID.SECRET'")
        record = self._store.keys.get(key_id) if self._store is not None else None
        expected = _NO_HASH if record is None else record.sha256
        is_equal = hmac.compare_digest(hash_secret(secret), expected)
        if record is None or not is_equal:
            raise AuthenticationError("the API key is not valid")
        return record.to_principal()
