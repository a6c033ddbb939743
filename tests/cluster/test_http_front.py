"""The outermost layer: credentials, request ids, logs, metrics, health."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from front_door import MODEL, FakeBackend, build_app, chat_body, client_of

from cluster.api.principal import Role
from cluster.auth.key_store import create_key

OPEN = ["/health", "/ready", "/-/healthz"]
CLOSED = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"), ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"), ("POST", "/tokenize"), ("POST", "/v1/detokenize"), ("GET", "/metrics"),
    ("HEAD", "/metrics"), ("GET", "/version"), ("GET", "/v1/nope"), ("GET", "//health"), ("GET", "/health/"),
    ("OPTIONS", "/v1/models"), ("PUT", "/v1/chat/completions"),
]  # fmt: skip


@pytest.fixture
def keys_path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def make_key(path: Path, role: Role | None = Role.DELEGATE, user: str | None = None, tenant: str = "acme") -> str:
    return create_key(path, tenant, roles=frozenset() if role is None else frozenset({role}), user=user)[1]


@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_everything_but_health_needs_a_key(keys_path: Path, method: str, path: str) -> None:
    key = make_key(keys_path)
    app = build_app(FakeBackend(), keys_path=keys_path)
    async with client_of(app) as stranger, client_of(app, key) as caller:
        refused = await stranger.request(method, path)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.headers["x-request-id"]
        if method != "HEAD":
            assert refused.json()["error"]["code"] == "missing_api_key"
        assert (await caller.request(method, path)).status_code != 401


@pytest.mark.parametrize("path", OPEN)
async def test_health_needs_no_key(keys_path: Path, path: str) -> None:
    make_key(keys_path)
    async with client_of(build_app(FakeBackend(), keys_path=keys_path)) as client:
        assert (await client.get(path)).status_code == 200


async def test_ready_follows_the_workers_and_health_does_not() -> None:
    backend = FakeBackend(ready=False)
    async with client_of(build_app(backend)) as client:
        refused = await client.get("/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert refused.headers["retry-after"] == "1"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/-/healthz")).text == "success"
        backend.ready = True
        assert (await client.get("/ready")).status_code == 200


async def test_metrics_are_for_operators_and_name_no_user(keys_path: Path) -> None:
    alice, operator = make_key(keys_path, None, "alice-of-acme"), make_key(keys_path, Role.OPERATOR)
    app = build_app(FakeBackend(cached_tokens=2), keys_path=keys_path)
    async with client_of(app, alice) as client:
        assert (await client.post("/v1/chat/completions", json=chat_body("hello"))).status_code == 200
        assert (await client.get("/metrics")).status_code == 403
        await client.get("/v1/models/alice-of-acme")
    async with client_of(app, operator) as client:
        assert (await client.head("/metrics")).status_code == 200
        text = (await client.get("/metrics")).text
    assert 'watchword_prompt_tokens_cached_total{model_name="tiny"} 2.0' in text
    assert 'watchword_generation_tokens_total{model_name="tiny"} 6.0' in text
    assert 'watchword_requests_total{model_name="tiny",outcome="stop"} 1.0' in text
    assert 'watchword_num_requests{model_name="tiny"} 0.0' in text
    assert 'watchword_time_to_first_token_seconds_bucket{le="0.001",model_name="tiny"}' in text
    assert 'watchword_inter_token_latency_seconds_bucket{le="0.075",model_name="tiny"}' in text
    assert 'watchword_e2e_request_latency_seconds_bucket{le="7680.0",model_name="tiny"} 1.0' in text
    assert 'route="/v1/models/{name:path}",status="404"' in text
    assert "alice" not in text
    assert "acme" not in text


async def test_the_worker_header_is_for_operators_or_everyone_on_demand(keys_path: Path) -> None:
    delegate, operator = make_key(keys_path), make_key(keys_path, Role.OPERATOR)
    for key, debug, is_shown in ((delegate, False, False), (operator, False, True), (delegate, True, True)):
        app = build_app(FakeBackend(), keys_path=keys_path, debug_headers=debug)
        async with client_of(app, key) as client:
            response = await client.post("/v1/chat/completions", json=chat_body())
        assert ("x-watchword-worker" in response.headers) is is_shown


@pytest.mark.parametrize(
    ("given", "is_echoed"),
    [("my-id_1.a:b", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("a;b", False), ("", False)],
)
async def test_a_sane_request_id_is_echoed_and_used_for_nothing_else(given: str, is_echoed: bool) -> None:
    backend = FakeBackend()
    async with client_of(build_app(backend)) as client:
        for _ in range(2):
            response = await client.post("/v1/chat/completions", json=chat_body(), headers={"x-request-id": given})
            own = response.headers["x-watchword-request-id"]
            assert response.headers["x-request-id"] == (given if is_echoed else own)
            assert response.json()["id"] == f"chatcmpl-{own}"
    ids = [request.request_id for request in backend.requests]
    assert len(set(ids)) == 2
    assert given not in ids


async def test_the_log_has_no_prompt_user_or_key(keys_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = make_key(keys_path)
    caplog.set_level(logging.INFO)
    async with client_of(build_app(FakeBackend(), keys_path=keys_path), key) as client:
        await client.post(
            "/v1/chat/completions?q=alice", json=chat_body("passphrase", user="alice", cache_salt="pepper")
        )
        await client.get("/v1/models/alice")
        await client.get("/alice")
    lines = [record.getMessage() for record in caplog.records if record.name == "watchword.access"]
    assert len(lines) == 3
    assert lines[0].startswith("POST /v1/chat/completions 200 ")
    assert f"key={key.split('.')[0]}" in lines[0]
    assert lines[2].startswith("GET unmatched 404 ")
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("watchword"))
    for word in ("alice", "passphrase", "pepper", key.split(".")[1]):
        assert word not in ours


async def test_two_users_requests_carry_different_hashes_and_no_names(keys_path: Path) -> None:
    """The pair: the same user's two requests carry the same ones."""
    key = make_key(keys_path)
    backend = FakeBackend()
    async with client_of(build_app(backend, keys_path=keys_path), key) as client:
        for user in ("alice", "bob", "alice"):
            await client.post("/v1/chat/completions", json=chat_body("x" * 40, user=user, prompt_cache_key="p"))
    first, second, third = backend.requests
    assert first.tenant_hash == second.tenant_hash
    assert first.user_hash != second.user_hash
    assert set(first.block_keys).isdisjoint(second.block_keys)
    assert len(first.block_keys) == 2
    assert (first.user_hash, first.block_keys) == (third.user_hash, third.block_keys)
    assert "alice" not in repr(first)
    assert backend.affinities[0] == backend.affinities[1] != "p"


async def test_identity_headers_count_from_a_configured_proxy_only(keys_path: Path) -> None:
    key = make_key(keys_path)
    backend = FakeBackend()
    app = build_app(backend, keys_path=keys_path, trusted_proxies=("10.1.1.1",))
    headers = {"X-OpenWebUI-User-Id": "alice"}
    for peer in ("10.1.1.1", "10.1.1.2"):
        async with client_of(app, key, peer=peer) as client:
            await client.post("/v1/chat/completions", json=chat_body("x"), headers=headers)
    async with client_of(app, key) as client:
        await client.post("/v1/chat/completions", json=chat_body("x", user="alice"))
        await client.post("/v1/chat/completions", json=chat_body("x"))
    proxied, spoofed, named, nameless = (request.user_hash for request in backend.requests)
    assert proxied == named
    assert spoofed == nameless != named


async def test_require_user_is_a_refusal_that_says_how(keys_path: Path) -> None:
    key = make_key(keys_path)
    async with client_of(build_app(FakeBackend(), keys_path=keys_path, require_user=True), key) as client:
        refused = await client.post("/v1/chat/completions", json=chat_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "user_required")
        assert (await client.post("/v1/chat/completions", json=chat_body(user="alice"))).status_code == 200


async def test_models_tokenize_and_version() -> None:
    async with client_of(build_app(FakeBackend())) as client:
        models: Any = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [MODEL, "tiny-poet"]
        assert models["data"][1]["parent"] == MODEL
        assert (await client.get(f"/v1/models/{MODEL}")).json() == models["data"][0]
        assert (await client.get("/version")).json() == {"version": "1.2.3"}
        for prefix in ("", "/v1"):
            body = {"model": MODEL, "prompt": "hé", "add_special_tokens": False, "return_token_strs": True}
            tokens = (await client.post(f"{prefix}/tokenize", json=body)).json()
            assert tokens == {
                "count": 3, "max_model_len": 512, "tokens": [0x68, 0xC3, 0xA9], "token_strs": ["h", "\ufffd", "\ufffd"],
            }  # fmt: skip
            back = await client.post(f"{prefix}/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]})
            assert back.json() == {"prompt": "hé"}
        chat = await client.post("/tokenize", json=chat_body("hi"))
        assert chat.json()["count"] == len("user:hi\n")


async def test_two_credentials_are_refused_and_not_chosen_from(keys_path: Path) -> None:
    first, second = make_key(keys_path), make_key(keys_path, tenant="beta")
    async with client_of(build_app(FakeBackend(), keys_path=keys_path)) as client:
        assert (await client.get("/version", headers=[("authorization", f"Bearer {first}")])).status_code == 200
        both = [("authorization", f"Bearer {key}") for key in (first, second)]
        refused = await client.get("/version", headers=both)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
