"""/v1/prompts over HTTP: who may, what a tenant sees, and that a registered prompt serves chat and responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from front_door import BLOCK_SIZE, EOS, FakeBackend, client_of
from prompt_rig import PromptRig, installed_table

from cluster.api.principal import Role
from cluster.auth.authenticator import Authenticator
from cluster.auth.key_store import create_key
from cluster.backend import ModelInfo
from cluster.http.config import HttpConfig
from cluster.http.front import Front
from cluster.http.prompt_routes import PromptRoutes
from cluster.http_app import build_http_app
from cluster.metrics import GatewayMetrics
from cluster.prompts.cardinality import CardinalityWatch
from cluster.prompts.sandbox import TemplateSandbox
from cluster.serving.core import ServedModel, ServingCore

GREETER: dict[str, Any] = {
    "messages": [{"role": "system", "content": "You greet people from {{ city }}. " + "Be kind and brief. " * 12}],
    "variables": {"city": {"share": "shared"}},
    "share": "variables",
}


class Door:
    """A front door with real templates and a real tokenizer in front of the fake backend."""

    def __init__(self, root: Path, sandbox: TemplateSandbox) -> None:
        rig = PromptRig(root / "templates", sandbox=sandbox)
        self.backend = FakeBackend(answer=lambda request, choice: bytes([40, 41]))
        self.keys_path = root / "keys.json"
        self.num_changes = 0
        tokens = installed_table()
        info = ModelInfo("smol", 2048, rig.tokenizer.vocab_size, frozenset({EOS}))
        core = ServingCore([ServedModel(info, rig.builder, tokens, rig.keyer)], self.backend)
        config = HttpConfig()
        prompts = PromptRoutes(rig.catalog, CardinalityWatch(), config, on_change=self.changed)
        authenticator = Authenticator(self.keys_path, allow_anonymous=False)
        self.app: Front = build_http_app(core, authenticator, GatewayMetrics(), config, extra_routes=prompts.routes())

    async def changed(self, owner: bytes | None) -> None:
        self.num_changes += 1

    def client(self, tenant: str, role: Role | None = Role.DELEGATE, user: str | None = None) -> httpx.AsyncClient:
        roles = frozenset() if role is None else frozenset({role})
        return client_of(self.app, create_key(self.keys_path, tenant, roles=roles, user=user)[1])


@pytest.fixture
def door(tmp_path: Path, sandbox: TemplateSandbox) -> Door:
    return Door(tmp_path, sandbox)


async def test_a_template_is_put_read_listed_and_deleted(door: Door) -> None:
    async with door.client("acme") as client:
        made = await client.put("/v1/prompts/greeter", json=GREETER)
        assert made.status_code == 200, made.text
        assert made.json()["id"] == "greeter"
        version = made.json()["version"]
        assert (await client.get("/v1/prompts/greeter")).json() == made.json()
        assert (await client.get(f"/v1/prompts/greeter?version={version}")).json() == made.json()
        assert (await client.get("/v1/prompts/greeter?version=0")).status_code == 404
        assert [item["id"] for item in (await client.get("/v1/prompts")).json()["data"]] == ["greeter"]
        assert (await client.delete("/v1/prompts/greeter")).json()["deleted"] is True
        assert (await client.get("/v1/prompts/greeter")).status_code == 404
    assert door.num_changes == 2


async def test_another_tenants_template_answers_as_an_absent_one(door: Door) -> None:
    async with door.client("acme") as acme, door.client("other") as other:
        await acme.put("/v1/prompts/greeter", json=GREETER)
        absent, foreign = await other.get("/v1/prompts/missing"), await other.get("/v1/prompts/greeter")
        assert absent.status_code == foreign.status_code == 404
        assert absent.json()["error"] == {**foreign.json()["error"], "message": absent.json()["error"]["message"]}
        assert absent.text.replace("missing", "greeter") == foreign.text
        assert (await other.get("/v1/prompts")).json()["data"] == []
        assert (await other.delete("/v1/prompts/greeter")).status_code == 404
        assert (await acme.get("/v1/prompts/greeter")).status_code == 200


async def test_users_may_use_templates_and_not_change_them(door: Door) -> None:
    async with door.client("acme") as delegate, door.client("acme", None, "alice") as alice:
        await delegate.put("/v1/prompts/greeter", json=GREETER)
        for refused in (
            await alice.put("/v1/prompts/greeter", json=GREETER),
            await alice.get("/v1/prompts"),
            await alice.delete("/v1/prompts/greeter"),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        body = {"model": "smol", "prompt": {"id": "greeter", "variables": {"city": "Bern"}}}
        user = [{"role": "user", "content": "hello"}]
        assert (await alice.post("/v1/chat/completions", json={**body, "messages": user})).status_code == 200
        assert (await alice.post("/v1/responses", json={**body, "input": "hello"})).status_code == 200
    chat, responses = door.backend.requests
    assert chat.prompt_token_ids == responses.prompt_token_ids
    assert chat.block_keys == responses.block_keys
    assert len(chat.prompt_token_ids) > 2 * BLOCK_SIZE


async def test_only_an_operator_declares_and_deletes_public_templates(door: Door) -> None:
    public = {**GREETER, "public": True}
    async with door.client("acme") as delegate, door.client("ops", Role.OPERATOR) as operator:
        assert (await delegate.put("/v1/prompts/greeter", json=public)).status_code == 403
        assert (await operator.put("/v1/prompts/greeter", json=public)).status_code == 200
        assert [item["id"] for item in (await delegate.get("/v1/prompts")).json()["data"]] == ["greeter"]
        assert (await delegate.delete("/v1/prompts/greeter?public=true")).status_code == 403
        assert (await operator.delete("/v1/prompts/greeter?public=yes")).status_code == 400
        assert (await operator.delete("/v1/prompts/greeter?public=true")).status_code == 200


async def test_bad_templates_and_variables_are_named(door: Door) -> None:
    async with door.client("acme") as client:
        assert (await client.put("/v1/prompts/a b", json=GREETER)).status_code == 400
        broken = {**GREETER, "messages": [{"role": "system", "content": "{{ town }}"}]}
        refused = await client.put("/v1/prompts/greeter", json=broken)
        assert "town" in refused.json()["error"]["message"]
        await client.put("/v1/prompts/greeter", json=GREETER)
        for variables, word in (({}, "city"), ({"city": 5}, "city"), ({"city": "a", "zip": "b"}, "zip")):
            body = {"model": "smol", "messages": [], "prompt": {"id": "greeter", "variables": variables}}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 400
            assert word in response.json()["error"]["message"]
        missing = {"model": "smol", "messages": [], "prompt": {"id": "nope"}}
        assert (await client.post("/v1/chat/completions", json=missing)).status_code == 404
