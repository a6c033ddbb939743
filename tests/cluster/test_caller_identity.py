"""Who a request's user is: the precedence table, and that a body only ever narrows."""

from __future__ import annotations

from itertools import combinations

import pytest
from front_door import keyer

from cluster.api.errors import InvalidRequestError
from cluster.api.ids import TenantId, UserId
from cluster.api.principal import Principal, Role
from cluster.api.prompt import CallerIdentity
from cluster.api.scope import Scope
from cluster.auth.authenticator import ANONYMOUS
from cluster.auth.caller import affinity_key, resolve_identity
from cluster.auth.proxy import IdentityHeaders
from cluster.serving.generate_input import CallerFields

KEYER = keyer()


def principal(role: Role | None, *path: str, tenant: str = "acme", key_id: str = "k1") -> Principal:
    roles = frozenset() if role is None else frozenset({role})
    return Principal(TenantId(tenant), roles, key_id, tuple(UserId(user) for user in path))


ALICE = principal(Role.USER, "alice")
BACKEND = principal(Role.DELEGATE)
OPERATOR = principal(Role.OPERATOR, key_id="k2")


def who(caller: Principal, *, require_user: bool = False, **fields: str) -> CallerIdentity:
    return resolve_identity(caller, CallerFields(**fields), KEYER, require_user=require_user)


def user(*path: str, tenant: str = "acme") -> bytes:
    return KEYER.identity("user", tenant, *path)


@pytest.mark.parametrize(
    ("caller", "fields", "expected"),
    [
        (ALICE, {}, user("alice")),
        (ALICE, {"user": "bob"}, user("alice", "bob")),
        (ALICE, {"user": "alice"}, user("alice", "alice")),
        (ALICE, {"safety_identifier": "bob"}, user("alice", "bob")),
        (ALICE, {"header_user": "bob"}, user("alice", "bob")),
        (BACKEND, {"user": "alice"}, user("alice")),
        (BACKEND, {"safety_identifier": "alice"}, user("alice")),
        (BACKEND, {"safety_identifier": "alice", "user": "alice"}, user("alice")),
        (BACKEND, {"header_user": "alice"}, user("alice")),
        (BACKEND, {"header_user": "alice", "user": "alice"}, user("alice")),
        (BACKEND, {"header_user": "alice", "user": "bob"}, user("alice", "bob")),
        (BACKEND, {}, KEYER.identity("credential", "acme", "k1")),
        (OPERATOR, {}, KEYER.identity("credential", "acme", "k2")),
        (OPERATOR, {"user": "alice"}, KEYER.identity("credential", "acme", "k2", "alice")),
        (principal(None), {"user": "alice"}, KEYER.identity("credential", "acme", "k1", "alice")),
        (ANONYMOUS, {}, KEYER.identity("credential", "default", "anonymous")),
        (ANONYMOUS, {"user": "alice"}, user("alice", tenant="default")),
    ],
)
def test_the_precedence_table(caller: Principal, fields: dict[str, str], expected: bytes) -> None:
    assert who(caller, **fields).user == expected


def test_callers_who_differ_have_identities_that_differ() -> None:
    identities = {
        "alice": who(ALICE),
        "alice's sub-user": who(ALICE, user="bob"),
        "bob": who(BACKEND, user="bob"),
        "slash": who(BACKEND, user="alice/bob"),
        "the credential": who(BACKEND),
        "a user named like the credential": who(BACKEND, user="k1"),
        "another key": who(principal(Role.DELEGATE, key_id="k9")),
        "another tenant's alice": who(principal(Role.USER, "alice", tenant="other")),
    }
    for (name, one), (other, two) in combinations(identities.items(), 2):
        assert one.user != two.user, (name, other)


def test_a_delegate_names_the_same_user_that_the_users_own_key_is() -> None:
    assert who(BACKEND, user="alice") == who(ALICE)


def test_contradictory_users_are_refused_and_not_quoted() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        who(BACKEND, user="anna-maria", safety_identifier="bob")
    assert "anna" not in caught.value.message
    assert caught.value.code == "conflicting_user"


def test_require_user_refuses_only_requests_that_name_none() -> None:
    for caller in (BACKEND, OPERATOR, ANONYMOUS):
        with pytest.raises(InvalidRequestError, match="name its user"):
            who(caller, require_user=True)
        assert who(caller, require_user=True, user="alice")
    assert who(ALICE, require_user=True) == who(ALICE)


def test_salt_and_session_narrow_within_the_user() -> None:
    plain, salted, session = who(ALICE), who(ALICE, cache_salt="x"), who(ALICE, session_id="x")
    assert (plain.private.scope, plain.private.salt, plain.private.session) == (Scope.USER, None, None)
    assert plain.user == salted.user == session.user
    assert salted.private.salt is not None
    assert session.private.scope is Scope.SESSION
    assert session.private.session not in (None, salted.private.salt)
    assert who(ALICE, cache_salt="x") == salted
    assert who(ALICE, cache_salt="y") != salted


def test_a_placement_key_is_hashed_within_the_tenant() -> None:
    fields = CallerFields(prompt_cache_key="chat-17")
    key = affinity_key(ALICE, fields, KEYER)
    assert key is not None
    assert "chat" not in key
    assert key != affinity_key(principal(Role.USER, "alice", tenant="other"), fields, KEYER)
    assert affinity_key(ALICE, CallerFields(), KEYER) is None
    assert resolve_identity(ALICE, fields, KEYER) == who(ALICE)


HEADERS = [("X-OpenWebUI-User-Id", "alice"), ("other", "x")]


@pytest.mark.parametrize(
    ("proxies", "peer", "expected"),
    [
        (["10.0.0.1"], "10.0.0.1", "alice"),
        (["10.0.0.0/8"], "10.9.9.9", "alice"),
        (["10.0.0.1"], "::ffff:10.0.0.1", "alice"),
        (["fd00::/8"], "fd00::7", "alice"),
        (["10.0.0.1"], "10.0.0.2", None),
        (["10.0.0.1"], None, None),
        (["10.0.0.1"], "not an address", None),
        ([], "10.0.0.1", None),
    ],
)
def test_identity_headers_count_only_from_a_configured_peer(
    proxies: list[str], peer: str | None, expected: str | None
) -> None:
    assert IdentityHeaders(proxies, ["x-openwebui-user-id"]).user_of(peer, HEADERS) == expected


def test_identity_headers_that_disagree_are_refused() -> None:
    headers = IdentityHeaders(["10.0.0.1"], ["x-user", "x-openwebui-user-id"])
    with pytest.raises(InvalidRequestError):
        headers.user_of("10.0.0.1", [*HEADERS, ("x-user", "bob")])
    assert headers.user_of("10.0.0.1", [*HEADERS, ("x-user", "alice")]) == "alice"


def test_a_proxy_that_is_no_address_is_refused_at_start() -> None:
    with pytest.raises(InvalidRequestError, match="not an IP address"):
        IdentityHeaders(["proxy.example"], [])
