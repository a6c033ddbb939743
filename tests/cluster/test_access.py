"""Whoever starts a server is told who will be let in, and never that the door is open when it is locked."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.api.errors import AuthenticationError, InvalidRequestError
from cluster.api.principal import Role
from cluster.auth.access import Access, access_at
from cluster.auth.authenticator import Authenticator
from cluster.auth.key_store import create_key, revoke_key

LOCAL, PUBLIC = "127.0.0.1", "0.0.0.0"


def access(host: str, keys_path: Path) -> Access:
    return access_at(host, keys_path, is_loopback=host == LOCAL)


def test_without_a_key_file_only_loopback_is_served_and_that_is_said(keys_path: Path) -> None:
    given = access(LOCAL, keys_path)
    assert not given.needs_key
    assert "operator" in (given.warning or "")
    assert Authenticator(keys_path, allow_anonymous=True).is_open
    with pytest.raises(InvalidRequestError, match=PUBLIC):
        access(PUBLIC, keys_path)


@pytest.mark.parametrize("host", [LOCAL, PUBLIC])
def test_with_a_key_there_is_nothing_to_say(keys_path: Path, host: str) -> None:
    create_key(keys_path, "acme", roles=frozenset({Role.DELEGATE}))
    given = access(host, keys_path)
    assert given.needs_key
    assert given.warning is None


@pytest.mark.parametrize("host", [LOCAL, PUBLIC])
def test_when_all_keys_are_revoked_the_door_is_locked_and_that_is_said(keys_path: Path, host: str) -> None:
    record, _ = create_key(keys_path, "acme", roles=frozenset({Role.OPERATOR}))
    revoke_key(keys_path, record.id)
    given = access(host, keys_path)
    assert given.needs_key
    warning = given.warning or ""
    assert "refused" in warning
    assert "operator" not in warning
    with pytest.raises(AuthenticationError):
        Authenticator(keys_path, allow_anonymous=host == LOCAL).authenticate(None)


def test_a_key_file_open_to_others_is_refused(keys_path: Path) -> None:
    create_key(keys_path, "acme", roles=frozenset())
    keys_path.chmod(0o644)
    with pytest.raises(InvalidRequestError, match="0644"):
        access(LOCAL, keys_path)
