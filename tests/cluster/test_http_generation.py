"""Chat completions and completions over a deterministic backend."""

from __future__ import annotations

import json
from typing import Any

import pytest
from front_door import EOS, MAX_MODEL_LEN, MODEL, FakeBackend, build_app, chat_body, client_of

from cluster.api.errors import OverloadedError, UnavailableError


async def post(backend: FakeBackend, path: str, body: dict[str, Any], **config: Any) -> Any:
    async with client_of(build_app(backend, **config)) as client:
        return await client.post(path, json=body)


async def stream(backend: FakeBackend, path: str, body: dict[str, Any]) -> list[Any]:
    """The JSON of each event; the last one must have been [DONE]."""
    response = await post(backend, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


async def test_a_chat_answer_has_openais_shape_and_counts_what_was_cached() -> None:
    response = await post(FakeBackend(cached_tokens=16), "/v1/chat/completions", chat_body("grüße 你好"))
    body = response.json()
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "grüße 你好", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    num_prompt, num_answer = len("user:grüße 你好\n".encode()), len("grüße 你好".encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


async def test_a_stream_says_the_role_first_and_the_same_text() -> None:
    events = await stream(FakeBackend(), "/v1/chat/completions", chat_body("héllo 🦊 wörld"))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "héllo 🦊 wörld"
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "stop"
    assert all("usage" not in event for event in events)
    assert len({event["id"] for event in events}) == 1


async def test_include_usage_adds_a_last_chunk_without_choices() -> None:
    body = chat_body("hello", stream_options={"include_usage": True})
    events = await stream(FakeBackend(cached_tokens=3), "/v1/chat/completions", body)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 6
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all(event["usage"] is None for event in events[:-1])


async def test_continuous_usage_grows() -> None:
    body = chat_body("hello there", stream_options={"include_usage": True, "continuous_usage_stats": True})
    events = await stream(FakeBackend(max_piece=1), "/v1/chat/completions", body)
    counts = [event["usage"]["completion_tokens"] for event in events if event["usage"]]
    assert counts == sorted(counts)
    assert len(set(counts)) > 3


async def test_several_choices_are_told_apart() -> None:
    backend = FakeBackend(answer=lambda request, choice: f"answer {choice}".encode())
    events = await stream(backend, "/v1/chat/completions", chat_body(n=3))
    texts = ["", "", ""]
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["answer 0", "answer 1", "answer 2"]


async def test_chat_logprobs_have_tokens_bytes_and_alternatives() -> None:
    response = await post(FakeBackend(), "/v1/chat/completions", chat_body("é!", logprobs=True, top_logprobs=2))
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert [item["bytes"] for item in content] == [[0xC3], [0xA9], [0x21]]
    assert content[2]["token"] == "!"
    assert content[2]["logprob"] == -0.5
    assert [item["bytes"] for item in content[2]["top_logprobs"]] == [[0x21], [0x22]]


async def test_completion_logprobs_are_in_the_older_format() -> None:
    response = await post(FakeBackend(), "/v1/completions", {"model": MODEL, "prompt": "abc", "logprobs": 1})
    assert response.json()["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}, {"c": -0.5}],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_list_of_prompts_becomes_choices_in_order(is_stream: bool) -> None:
    body = {"model": MODEL, "prompt": ["first", "second"], "n": 2}
    backend = FakeBackend()
    texts = [""] * 4
    if is_stream:
        for event in await stream(backend, "/v1/completions", body):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        for choice in (await post(backend, "/v1/completions", body)).json()["choices"]:
            texts[choice["index"]] = choice["text"]
    assert texts == ["first", "first", "second", "second"]
    assert len({request.request_id for request in backend.requests}) == 2


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]]])
async def test_token_ids_are_taken_as_they_are(prompt: Any) -> None:
    backend = FakeBackend()
    response = await post(backend, "/v1/completions", {"model": MODEL, "prompt": prompt})
    assert response.json()["choices"][0]["text"] == "hi"
    assert backend.requests[0].prompt_token_ids == (104, 105)


async def test_a_stop_string_is_cut_out_and_the_engine_is_stopped() -> None:
    backend = FakeBackend(max_piece=3)
    response = await post(backend, "/v1/chat/completions", chat_body("one two three four five", stop="three"))
    body = response.json()
    assert body["choices"][0]["message"]["content"] == "one two "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == "three"
    assert body["usage"]["completion_tokens"] == len("one two three")
    assert backend.num_aborted == 1
    assert backend.num_running == 0


async def test_without_max_tokens_the_rest_of_the_context_is_used() -> None:
    backend = FakeBackend()
    response = await post(backend, "/v1/completions", {"model": MODEL, "prompt": "ab", "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == MAX_MODEL_LEN - 2
    assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_sampling_fields_reach_the_engine() -> None:
    backend = FakeBackend()
    fields = {
        "max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": -5, "n": 2,
        "stop_token_ids": [EOS], "presence_penalty": 1, "frequency_penalty": -1.5, "repetition_penalty": 1.2,
        "logit_bias": {"7": 3}, "min_tokens": 2, "logprobs": True,
    }  # fmt: skip
    assert (await post(backend, "/v1/chat/completions", chat_body(**fields))).status_code == 200
    sampling = backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 0)
    assert (sampling.min_p, sampling.seed, sampling.n, sampling.stop_token_ids) == (0.1, -5, 2, (EOS,))
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.2, ((7, 3.0),))
    assert (sampling.min_tokens, sampling.logprobs) == (2, 0)


async def test_a_seed_is_drawn_when_none_is_given() -> None:
    backend = FakeBackend()
    for _ in range(2):
        await post(backend, "/v1/chat/completions", chat_body())
    assert backend.requests[0].sampling.seed != backend.requests[1].sampling.seed


async def test_an_adapter_is_a_model_with_keys_of_its_own() -> None:
    backend = FakeBackend()
    for model in (MODEL, "tiny-poet"):
        await post(backend, "/v1/chat/completions", {**chat_body("x" * 40), "model": model})
    base, adapted = backend.requests
    assert (base.adapter, adapted.adapter) == (None, "tiny-poet")
    assert base.prompt_token_ids == adapted.prompt_token_ids
    assert len(base.block_keys) == 2
    assert set(base.block_keys).isdisjoint(adapted.block_keys)


async def test_a_refusal_before_the_first_token_keeps_its_status_in_a_stream() -> None:
    backend = FakeBackend(error=OverloadedError("the queue is full", retry_after_s=2.5))
    response = await post(backend, "/v1/chat/completions", chat_body(stream=True))
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert response.headers["x-should-retry"] == "true"
    assert response.json()["error"]["code"] == "overloaded"


async def test_an_error_in_the_middle_of_a_stream_is_an_event_before_done() -> None:
    backend = FakeBackend(error=UnavailableError("all workers are gone"), error_after=2)
    events = await stream(backend, "/v1/chat/completions", chat_body("a longer answer than that"))
    assert events[-1] == {
        "error": {"message": "all workers are gone", "type": "server_error", "param": None, "code": "unavailable"}
    }
    assert any(event.get("choices") for event in events)


@pytest.mark.parametrize("error_after", [0, 2])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_bug_says_nothing_about_itself(
    error_after: int, is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FakeBackend(error=ValueError("secret prompt text"), error_after=error_after)
    response = await post(backend, "/v1/chat/completions", chat_body("a longer answer", stream=is_stream))
    assert "internal_error" in response.text
    assert "secret" not in response.text
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


async def test_the_worker_is_named_to_operators() -> None:
    response = await post(FakeBackend(), "/v1/chat/completions", chat_body(stream=True))
    assert response.headers["x-watchword-worker"] == "worker-1"
