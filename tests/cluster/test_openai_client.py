"""The real `openai` client against the front door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from front_door import MODEL, FakeBackend, build_app

from cluster.api.errors import OverloadedError
from cluster.api.principal import Role
from cluster.auth.key_store import create_key

HELLO: Any = [{"role": "user", "content": "héllo 🦊"}]


def client_of(backend: FakeBackend, key: str = "sk-unused", **config: Any) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(app=build_app(backend, **config))
    return openai.AsyncOpenAI(
        api_key=key,
        base_url="http://gateway/v1",
        http_client=httpx.AsyncClient(transport=transport),
        max_retries=2,
    )


async def test_chat_and_its_stream() -> None:
    client = client_of(FakeBackend(cached_tokens=4))
    whole = await client.chat.completions.create(
        model=MODEL, messages=HELLO, user="u1", safety_identifier="u1", prompt_cache_key="p",
        extra_body={"cache_salt": "s", "top_k": 3},
    )  # fmt: skip
    assert whole.choices[0].message.content == "héllo 🦊"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 4
    assert whole._request_id
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "héllo 🦊"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("héllo 🦊".encode()) + 1


async def test_the_stream_helper() -> None:
    async with client_of(FakeBackend()).chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "héllo 🦊"


async def test_completions_with_logprobs_and_several_prompts() -> None:
    client = client_of(FakeBackend())
    whole = await client.completions.create(model=MODEL, prompt=["ab", "cd"], logprobs=1, max_tokens=5)
    assert [choice.text for choice in whole.choices] == ["ab", "cd"]
    assert whole.choices[1].logprobs is not None
    assert whole.choices[1].logprobs.tokens == ["c", "d"]


async def test_responses_and_their_events() -> None:
    client = client_of(FakeBackend(cached_tokens=2))
    whole = await client.responses.create(model=MODEL, input="héllo 🦊", instructions="be brief", max_output_tokens=400)
    assert whole.output_text == "héllo 🦊"
    assert whole.status == "completed"
    assert whole.usage is not None
    assert whole.usage.input_tokens_details.cached_tokens == 2
    stream = await client.responses.create(model=MODEL, input=HELLO, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "héllo 🦊"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "héllo 🦊"


async def test_a_response_cut_by_its_limit_is_incomplete() -> None:
    whole = await client_of(FakeBackend()).responses.create(model=MODEL, input="hello", max_output_tokens=3)
    assert (whole.status, whole.output_text) == ("incomplete", "hel")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"


async def test_models() -> None:
    client = client_of(FakeBackend())
    assert [model.id async for model in client.models.list()] == [MODEL, "tiny-poet"]
    assert (await client.models.retrieve(MODEL)).owned_by == "watchword"


async def test_errors_arrive_as_the_clients_own_types(tmp_path: Path) -> None:
    client = client_of(FakeBackend())
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nope", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    keys_path = tmp_path / "keys.json"
    _, key = create_key(keys_path, "acme", roles=frozenset({Role.DELEGATE}))
    with pytest.raises(openai.AuthenticationError) as denied:
        await client_of(FakeBackend(), keys_path=keys_path).models.list()
    assert denied.value.code == "invalid_api_key"
    assert [model.id async for model in client_of(FakeBackend(), key, keys_path=keys_path).models.list()]


async def test_overload_is_retried_and_a_refusal_is_not() -> None:
    overloaded = FakeBackend(error=OverloadedError("the queue is full", retry_after_s=0.01))
    with pytest.raises(openai.InternalServerError) as full:
        await client_of(overloaded).chat.completions.create(model=MODEL, messages=HELLO)
    assert full.value.status_code == 503
    assert len(overloaded.requests) == 3  # the first try and two more
    broken = FakeBackend(error=ValueError("a bug"))
    with pytest.raises(openai.InternalServerError):
        await client_of(broken).chat.completions.create(model=MODEL, messages=HELLO)
    assert len(broken.requests) == 1  # x-should-retry: false


async def test_an_error_in_a_stream_reaches_the_caller() -> None:
    backend = FakeBackend(error=OverloadedError("gone"), error_after=1)
    client = client_of(backend)
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="gone"):
        _ = [chunk async for chunk in stream]
    events = await client.responses.create(model=MODEL, input="hello there", stream=True)
    last = [event async for event in events][-1]
    assert last.type == "error"
    assert (last.code, last.message) == ("overloaded", "gone")
