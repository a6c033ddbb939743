"""From the body of an HTTP request to blocks of an engine's cache, with only cluster and weights left out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from front_door import EOS, client_of
from prompt_rig import BLOCK_SIZE, SECRET, PromptRig, installed_tokenizer
from scope_rig import ScopeEngine, fake_model_identity

from cache_service.block_key import BlockKeyer
from cluster.api.output import RequestOutput
from cluster.api.principal import Role
from cluster.api.request import Request
from cluster.auth.authenticator import Authenticator
from cluster.auth.key_store import create_key
from cluster.backend import ModelInfo, Placement
from cluster.http.cache_routes import CacheRoutes
from cluster.http.config import HttpConfig
from cluster.http_app import build_http_app
from cluster.metrics import GatewayMetrics
from cluster.prompts.policy import Share, SharingPolicy
from cluster.prompts.sandbox import TemplateSandbox
from cluster.serving.core import ServedModel, ServingCore
from cluster.serving.token_table import TokenTable
from workers.engine import LLMEngine

pytestmark = pytest.mark.weights

STATIC = "You are the polite and patient assistant of a shop that sells furniture of every kind. " * 3
SOURCE = STATIC + "The product is {{ product }}. " + STATIC + "The user is called {{ name }}. " + STATIC
QUESTION = "Tell me something about the history of chairs in the old world, please, and take your time. " * 3
OPEN_WEB_UI = "x-openwebui-user-id"


@cache
def token_table() -> TokenTable:
    return TokenTable.from_tokenizer(installed_tokenizer().backend)


class EngineBackend:
    """One engine, one request at a time."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine

    async def is_ready(self) -> bool:
        return True

    async def generate(
        self, request: Request, *, affinity_key: str | None = None, placement: Placement | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        self.engine.add_request(request)
        while self.engine.has_work:
            for output in self.engine.step():
                yield output

    async def purge(self, user_hash: bytes) -> int:
        return self.engine.purge_user(user_hash)


class Service:
    """Tenants acme (may share everything) and globex (nothing), under a policy that shares templates only."""

    def __init__(self, root: Path, sandbox: TemplateSandbox) -> None:
        identity = fake_model_identity()
        shares = {"acme": Share.VARIABLES, "globex": Share.NONE}
        keyer = BlockKeyer(SECRET, identity)
        policy = SharingPolicy(Share.TEMPLATE, {keyer.identity("tenant", name): it for name, it in shares.items()})
        rig = PromptRig(root, sandbox=sandbox, identity=identity, policy=policy)
        for tenant in ("acme", "globex", "initech"):
            rig.put(SOURCE, shared=["product"], private=["name"], tenant=tenant)
        scoped = ScopeEngine(rig, num_blocks=256, max_model_len=1024)
        scoped.warm_up()
        backend = EngineBackend(scoped.engine)
        info = ModelInfo("smol", 1024, rig.tokenizer.vocab_size, frozenset({EOS}))
        core = ServingCore([ServedModel(info, rig.builder, token_table(), rig.keyer)], backend)
        self.app = build_http_app(
            core,
            Authenticator(root / "keys.json", allow_anonymous=False),
            GatewayMetrics(),
            HttpConfig(trusted_proxies=("10.0.0.1",)),
            extra_routes=CacheRoutes(core, backend.purge).routes(),
        )
        self._keys = {
            tenant: create_key(root / "keys.json", tenant, roles=frozenset({Role.DELEGATE}))[1]
            for tenant in ("acme", "globex", "initech")
        }

    async def cached(self, user: str | None, tenant: str = "acme", product: str = "chair", **extra: Any) -> int:
        """Blocks that this user's question took from the cache."""
        peer, headers = extra.pop("peer", "127.0.0.1"), extra.pop("headers", {})
        body = {
            "model": "smol",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": QUESTION}],
            "prompt": {"id": "t", "variables": {"product": product, "name": "Alice"}},
            **({} if user is None else {"user": user}),
            **extra,
        }
        return await self._ask("/v1/chat/completions", body, tenant, peer, headers)

    async def cached_in_response(self, user: str, **extra: Any) -> int:
        prompt = {"id": "t", "variables": {"product": "chair", "name": "Alice"}}
        body = {"model": "smol", "max_output_tokens": 1, "input": QUESTION, "prompt": prompt, "user": user, **extra}
        return await self._ask("/v1/responses", body, "acme", "127.0.0.1", {})

    async def delete(self, user: str) -> int:
        async with client_of(self.app, self._keys["acme"]) as client:
            return int((await client.delete(f"/v1/users/{user}/cache")).json()["num_blocks"])

    async def _ask(self, path: str, body: dict[str, Any], tenant: str, peer: str, headers: dict[str, str]) -> int:
        async with client_of(self.app, self._keys[tenant], peer) as client:
            response = await client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return int(details["cached_tokens"]) // BLOCK_SIZE


@pytest.fixture
def service(tmp_path: Path, sandbox: TemplateSandbox) -> Service:
    return Service(tmp_path, sandbox)


async def test_each_request_takes_what_policy_and_its_own_word_allow(service: Service) -> None:
    template = await service.cached("alice")
    assert template >= 3, "pinned before anybody came"
    everything = await service.cached("alice")
    variables = await service.cached("bob")
    assert template < variables < everything
    asks: list[Callable[..., Awaitable[int]]] = [service.cached, service.cached_in_response]
    for number, ask in enumerate(asks):
        assert await ask("carol", share="none") == 0
        assert await ask("carol", share="none") == 0
        assert await ask(f"user-{number}", share="user") == 0
        assert await ask(f"template-{number}", share="template") == template
        assert await ask(f"variables-{number}", share="variables") == variables
    assert await service.cached("user-0", share="user") == everything, "but from themselves"


async def test_the_operator_s_word_for_a_tenant_cannot_be_widened(service: Service) -> None:
    for share in (None, "variables"):
        assert await service.cached("alice", "globex", share=share) == 0
        assert await service.cached("alice", "globex", share=share) == 0, "not even from herself"
    template = await service.cached("alice", "initech", share="variables")
    assert await service.cached("bob", "initech", share="variables") == template > 0
    assert await service.cached("alice", "initech") > template, "but from herself"


async def test_sessions_salts_and_front_ends_users_stay_apart(service: Service) -> None:
    template = await service.cached("alice")
    everything, variables = await service.cached("alice"), await service.cached("bob")
    assert await service.cached("alice", session_id="s1") == variables
    assert await service.cached("alice", session_id="s1") == everything
    assert await service.cached("alice", session_id="s2") == variables
    assert await service.cached("alice", cache_salt="x") == template
    assert await service.cached("alice", cache_salt="x") == everything
    named = {OPEN_WEB_UI: "alice"}
    assert await service.cached(None, peer="10.0.0.1", headers=named) == everything, "the proxy's word"
    assert await service.cached(None, peer="10.0.0.2", headers=named) == variables, "anybody's word is not"


async def test_a_deleted_user_s_cache_leaves_the_template_alone(service: Service) -> None:
    template = await service.cached("alice")
    await service.cached("alice", session_id="s1")
    assert await service.cached("alice") > template
    assert await service.delete("alice") > 0
    assert await service.cached("alice", share="template", session_id="s1") == template
    assert await service.delete("alice") > 0
    assert await service.cached("alice") == template
    assert await service.cached("alice") > template
