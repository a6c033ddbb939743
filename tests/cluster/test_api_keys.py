"""API keys: how they are made, stored, found, changed and refused."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from cluster.api.errors import AuthenticationError, InvalidRequestError, NotFoundError
from cluster.api.principal import Role
from cluster.auth.authenticator import ANONYMOUS, Authenticator
from cluster.auth.key_store import KeyStore, create_key, list_keys, revoke_key, rotate_key

DELEGATE = frozenset({Role.DELEGATE})
OPERATOR = frozenset({Role.OPERATOR})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys.json"


def test_a_key_is_found_by_its_id_and_only_its_hash_is_stored(path: Path) -> None:
    record, key = create_key(path, "acme", roles=frozenset(), user="alice")
    key_id, secret = key.split(".")
    assert key_id == record.id
    assert record.sha256 == sha256(secret.encode()).hexdigest()
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    principal = Authenticator(path, allow_anonymous=False).authenticate(f"Bearer {key}")
    assert (principal.tenant, principal.user_path, principal.roles) == ("acme", ("alice",), frozenset({Role.USER}))


def test_roles_come_from_the_key(path: Path) -> None:
    authenticator = Authenticator(path, allow_anonymous=False)
    delegate = authenticator.authenticate(f"bearer {create_key(path, 'acme', roles=DELEGATE)[1]}")
    operator = authenticator.authenticate(f"Bearer {create_key(path, 'acme', roles=OPERATOR)[1]}")
    assert (delegate.is_delegate, delegate.is_operator, delegate.user_path) == (True, False, ())
    assert (operator.is_delegate, operator.is_operator) == (False, True)


@pytest.mark.parametrize(
    "make", [lambda key: key[:-1], lambda key: key + "x", lambda key: "ww-0." + key.split(".")[1], lambda key: "x.y"]
)
def test_a_wrong_key_is_refused_in_the_same_words(path: Path, make: object) -> None:
    _, key = create_key(path, "acme", roles=DELEGATE)
    authenticator = Authenticator(path, allow_anonymous=True)
    with pytest.raises(AuthenticationError) as caught:
        authenticator.authenticate(f"Bearer {make(key)}")  # type: ignore[operator]
    assert caught.value.message == "the API key is not valid"
    assert authenticator.authenticate(f"Bearer {key}").tenant == "acme"


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer nodot", "Basic a.b", "a.b"])
def test_a_missing_or_malformed_credential_is_refused(path: Path, header: str | None) -> None:
    create_key(path, "acme", roles=DELEGATE)
    with pytest.raises(AuthenticationError):
        Authenticator(path, allow_anonymous=True).authenticate(header)


def test_a_revoked_key_is_refused_from_the_next_request_on(path: Path) -> None:
    record, key = create_key(path, "acme", roles=DELEGATE)
    _, other = create_key(path, "acme", roles=DELEGATE)
    authenticator = Authenticator(path, allow_anonymous=True)
    assert authenticator.authenticate(f"Bearer {key}").key_id == record.id
    revoke_key(path, record.id)
    with pytest.raises(AuthenticationError):
        authenticator.authenticate(f"Bearer {key}")
    assert authenticator.authenticate(f"Bearer {other}")
    with pytest.raises(NotFoundError):
        revoke_key(path, record.id)


def test_rotation_keeps_who_the_caller_is_and_voids_the_old_secret(path: Path) -> None:
    record, old = create_key(path, "acme", roles=frozenset(), user="alice")
    authenticator = Authenticator(path, allow_anonymous=False)
    before = authenticator.authenticate(f"Bearer {old}")
    _, new = rotate_key(path, record.id)
    assert authenticator.authenticate(f"Bearer {new}") == before
    with pytest.raises(AuthenticationError):
        authenticator.authenticate(f"Bearer {old}")


def test_listing_is_by_tenant(path: Path) -> None:
    made = [create_key(path, tenant, roles=DELEGATE)[0].id for tenant in ("acme", "other", "acme")]
    assert {record.id for record in list_keys(path)} == set(made)
    assert {record.id for record in list_keys(path, "acme")} == {made[0], made[2]}
    assert {record.id for record in KeyStore(path).list_keys()} == set(made)


@pytest.mark.parametrize("tenant", ["default", "Public", "system", "_x", "", "a\nb", "x" * 129])
def test_reserved_and_unprintable_tenants_are_refused(path: Path, tenant: str) -> None:
    with pytest.raises(InvalidRequestError):
        create_key(path, tenant, roles=DELEGATE)
    assert not path.exists()


def test_a_users_key_has_no_other_role(path: Path) -> None:
    for roles in (DELEGATE, OPERATOR):
        with pytest.raises(InvalidRequestError):
            create_key(path, "acme", roles=roles, user="alice")


def test_without_keys_the_caller_is_operator_and_delegate_only_where_that_is_allowed(path: Path) -> None:
    assert Authenticator(path, allow_anonymous=True).authenticate(None) is ANONYMOUS
    assert Authenticator(None, allow_anonymous=True).authenticate("Bearer sk-x") is ANONYMOUS
    assert (ANONYMOUS.tenant, ANONYMOUS.is_operator, ANONYMOUS.is_delegate) == ("default", True, True)
    with pytest.raises(AuthenticationError):
        Authenticator(path, allow_anonymous=False).authenticate(None)


def test_the_first_key_closes_the_door_and_deleting_the_file_does_not_open_it(path: Path) -> None:
    authenticator = Authenticator(path, allow_anonymous=True)
    assert authenticator.is_open
    _, key = create_key(path, "acme", roles=DELEGATE)
    assert not authenticator.is_open
    assert authenticator.authenticate(f"Bearer {key}").tenant == "acme"
    path.unlink()
    for header in (None, f"Bearer {key}"):
        with pytest.raises(AuthenticationError):
            authenticator.authenticate(header)


def test_a_broken_file_keeps_the_last_good_keys_and_says_so_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, key = create_key(path, "acme", roles=DELEGATE)
    authenticator = Authenticator(path, allow_anonymous=True)
    authenticator.authenticate(f"Bearer {key}")
    path.write_text("{")
    assert authenticator.authenticate(f"Bearer {key}").tenant == "acme"
    assert authenticator.authenticate(f"Bearer {key}").tenant == "acme"
    assert authenticator.load_error is not None
    assert len([record for record in caplog.records if record.name == "watchword.auth"]) == 1
    with pytest.raises(AuthenticationError):
        Authenticator(path, allow_anonymous=True).authenticate(None)


def test_a_file_that_others_may_read_is_not_used(path: Path) -> None:
    _, key = create_key(path, "acme", roles=DELEGATE)
    path.chmod(0o644)
    authenticator = Authenticator(path, allow_anonymous=True)
    assert "0644" in (authenticator.load_error or "")
    with pytest.raises(AuthenticationError):
        authenticator.authenticate(f"Bearer {key}")


def test_a_tampered_record_never_widens_rights(path: Path) -> None:
    create_key(path, "acme", roles=frozenset(), user="alice")
    data = json.loads(path.read_text())
    data["keys"][0]["roles"] = ["user", "operator"]
    path.write_text(json.dumps(data))
    assert "no other role" in (Authenticator(path, allow_anonymous=True).load_error or "")


def test_keys_made_at_the_same_time_are_all_kept(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: create_key(path, "acme", roles=DELEGATE)[0].id, range(24)))
    assert {record.id for record in list_keys(path)} == set(made)
