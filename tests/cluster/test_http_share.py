"""`share` in a body: it reaches the prompt builder, and a prompt that may not be reused leaves as such a request."""

from __future__ import annotations

from typing import Any

import pytest
from front_door import MODEL, BytePrompts, FakeBackend, build_app, chat_body, client_of

from cluster.prompts.policy import Share

CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(),
    "/v1/responses": {"model": MODEL, "input": "hello"},
    "/v1/completions": {"model": MODEL, "prompt": "hello"},
}


@pytest.mark.parametrize("path", CALLS)
async def test_a_request_says_how_far_it_may_be_shared(path: str) -> None:
    backend, prompts = FakeBackend(), BytePrompts()
    async with client_of(build_app(backend, prompts=prompts)) as client:
        for share in (None, *(share.value for share in Share)):
            assert (await client.post(path, json={**CALLS[path], "share": share})).status_code == 200
    assert prompts.shares == [None, *Share]
    assert [request.use_prefix_cache for request in backend.requests] == [True, False, True, True, True]


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("value", ["public", "User", "", 1, True, ["user"], {"a": 1}])
async def test_another_word_is_refused_by_name(path: str, value: object) -> None:
    backend = FakeBackend()
    async with client_of(build_app(backend)) as client:
        refused = await client.post(path, json={**CALLS[path], "share": value})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "share"
    assert "none, user, template, variables" in error["message"]
    assert backend.requests == []


async def test_token_ids_are_narrowed_too() -> None:
    prompts = BytePrompts()
    async with client_of(build_app(FakeBackend(), prompts=prompts)) as client:
        body = {"model": MODEL, "prompt": [[1, 2], [3]], "share": "user"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert prompts.shares == [Share.USER, Share.USER]
