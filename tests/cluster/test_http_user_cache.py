"""DELETE /v1/users/{user}/cache: only the user and its delegates, and exactly the hash that requests carry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from front_door import FakeBackend, build_core, chat_body, client_of

from cluster.api.principal import Role
from cluster.auth.authenticator import Authenticator
from cluster.auth.key_store import create_key
from cluster.http.cache_routes import CacheRoutes
from cluster.http.config import HttpConfig
from cluster.http_app import build_http_app
from cluster.metrics import GatewayMetrics


class Door:
    def __init__(self, keys_path: Path) -> None:
        self.backend = FakeBackend()
        self.purged: list[bytes] = []
        self._keys_path = keys_path
        core = build_core(self.backend)
        authenticator = Authenticator(keys_path, allow_anonymous=False)
        routes = CacheRoutes(core, self.purge).routes()
        self.app = build_http_app(core, authenticator, GatewayMetrics(), HttpConfig(), extra_routes=routes)

    async def purge(self, user_hash: bytes) -> int:
        self.purged.append(user_hash)
        return sum(request.user_hash == user_hash for request in self.backend.requests)

    def client(self, role: Role | None, user: str | None = None, tenant: str = "acme") -> Any:
        roles = frozenset() if role is None else frozenset({role})
        return client_of(self.app, create_key(self._keys_path, tenant, roles=roles, user=user)[1])


@pytest.fixture
def door(keys_path: Path) -> Door:
    return Door(keys_path)


async def test_a_user_and_its_delegate_remove_what_the_users_requests_wrote(door: Door) -> None:
    async with door.client(None, "alice") as alice, door.client(Role.DELEGATE) as delegate:
        await alice.post("/v1/chat/completions", json=chat_body())
        for client in (alice, delegate):
            response = await client.delete("/v1/users/alice/cache")
            assert response.json() == {"object": "user.cache.deleted", "num_blocks": 1}
        assert (await delegate.delete("/v1/users/bob/cache")).json()["num_blocks"] == 0


async def test_nobody_else_may(door: Door) -> None:
    async with (
        door.client(None, "bob") as bob,
        door.client(Role.OPERATOR) as operator,
        door.client(None) as nameless,
    ):
        for client in (bob, operator, nameless):
            response = await client.delete("/v1/users/alice/cache")
            assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
    assert door.purged == []


async def test_another_tenants_delegate_removes_nothing_of_this_tenants_user(door: Door) -> None:
    async with door.client(None, "alice") as alice, door.client(Role.DELEGATE, tenant="other") as other:
        await alice.post("/v1/chat/completions", json=chat_body())
        assert (await other.delete("/v1/users/alice/cache")).json()["num_blocks"] == 0
        assert (await alice.delete("/v1/users/alice/cache")).json()["num_blocks"] == 1
