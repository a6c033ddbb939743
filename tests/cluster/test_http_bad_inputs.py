"""Bad requests: each answers in OpenAI's shape, names what is wrong, and leaves the server as it was."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest
from front_door import MODEL, VOCAB_SIZE, BytePrompts, FakeBackend, build_app, chat_body, client_of

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"


def text_body(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def responses_body(given: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": given, **fields}


# (path, body, status, code or None, param or None, a word of the message)
BAD_FIELDS: list[tuple[str, Any, int, str | None, str | None, str]] = [
    (CHAT, chat_body(max_tokens=-1), 400, None, "max_tokens", "-1"),
    (CHAT, chat_body(max_tokens=0), 400, None, "max_tokens", "at least 1"),
    (CHAT, chat_body(max_tokens="5"), 400, "invalid_type", "max_tokens", "an integer, got a string"),
    (CHAT, chat_body(max_tokens=5.5), 400, "invalid_type", "max_tokens", "5.5"),
    (CHAT, chat_body(max_tokens=True), 400, "invalid_type", "max_tokens", "true"),
    (CHAT, chat_body(max_tokens=10**40), 400, None, "max_tokens", "max_tokens"),
    (CHAT, chat_body(max_tokens=5, max_completion_tokens=6), 400, None, "max_tokens", "differ"),
    (CHAT, chat_body(max_completion_tokens=9999), 400, "context_length_exceeded", "max_tokens", "9999"),
    (CHAT, chat_body("x" * 600), 400, "context_length_exceeded", "messages", "512"),
    (CHAT, chat_body(temperature=-0.1), 400, None, "temperature", "[0.0, 2.0]"),
    (CHAT, chat_body(temperature=2.1), 400, None, "temperature", "2.1"),
    (CHAT, chat_body(temperature=True), 400, "invalid_type", "temperature", "a number"),
    (CHAT, chat_body(temperature="hot"), 400, "invalid_type", "temperature", "a number"),
    (CHAT, chat_body(top_p=0), 400, None, "top_p", "(0.0, 1.0]"),
    (CHAT, chat_body(top_p=1.5), 400, None, "top_p", "1.5"),
    (CHAT, chat_body(top_k=-2), 400, None, "top_k", "-2"),
    (CHAT, chat_body(min_p=1.1), 400, None, "min_p", "1.1"),
    (CHAT, chat_body(presence_penalty=3), 400, None, "presence_penalty", "3"),
    (CHAT, chat_body(frequency_penalty=-3), 400, None, "frequency_penalty", "-3"),
    (CHAT, chat_body(repetition_penalty=0), 400, None, "repetition_penalty", "0"),
    (CHAT, chat_body(n=0), 400, None, "n", "[1, 128]"),
    (CHAT, chat_body(n=129), 400, None, "n", "129"),
    (CHAT, chat_body(seed=2**63), 400, None, "seed", str(2**63)),
    (CHAT, chat_body(seed=1.5), 400, "invalid_type", "seed", "1.5"),
    (CHAT, chat_body(stop=""), 400, None, "stop", "0 characters"),
    (CHAT, chat_body(stop=[1]), 400, "invalid_type", "stop", "a string"),
    (CHAT, chat_body(stop=["a"] * 17), 400, None, "stop", "17"),
    (CHAT, chat_body(stop="x" * 1025), 400, None, "stop", "1025"),
    (CHAT, chat_body(stop_token_ids=[VOCAB_SIZE]), 400, None, "stop_token_ids", str(VOCAB_SIZE)),
    (CHAT, chat_body(stop_token_ids=["a"]), 400, "invalid_type", "stop_token_ids[0]", "an integer"),
    (CHAT, chat_body(logit_bias={"x" * 9999: "y"}), 400, "invalid_type", "logit_bias." + "x" * 69 + "…", "a number"),
    (CHAT, chat_body(temperature=10**400), 400, "invalid_type", "temperature", "very large"),
    (CHAT, chat_body(logit_bias={"x": 1}), 400, None, "logit_bias", "token ids"),
    (CHAT, chat_body(logit_bias={"-1": 1}), 400, None, "logit_bias", "token ids"),
    (CHAT, chat_body(logit_bias={"1": 101}), 400, None, "logit_bias", "101"),
    (CHAT, chat_body(logit_bias={str(VOCAB_SIZE): 1}), 400, None, "logit_bias", str(VOCAB_SIZE)),
    (CHAT, chat_body(min_tokens=5, max_tokens=4), 400, None, "min_tokens", "[0, 4]"),
    (CHAT, chat_body(logprobs=True, top_logprobs=21), 400, None, "logprobs", "21"),
    (CHAT, chat_body(top_logprobs=2), 400, None, "top_logprobs", "logprobs"),
    (CHAT, chat_body(stream_options={"include_usage": True}), 400, None, "stream_options", "stream"),
    (CHAT, chat_body(stream="yes"), 400, "invalid_type", "stream", "true or false"),
    (CHAT, {"model": MODEL}, 400, None, "messages", "required"),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, 400, None, "model", "required"),
    (CHAT, {**chat_body(), "model": 7}, 400, "invalid_type", "model", "a string, got 7"),
    (CHAT, {**chat_body(), "model": "nope"}, 404, "model_not_found", "model", "nope"),
    (CHAT, {"model": MODEL, "messages": "hi"}, 400, None, "messages", "a list"),
    (CHAT, {"model": MODEL, "messages": []}, 400, None, "messages", "empty"),
    (CHAT, {"model": MODEL, "messages": ["hi"]}, 400, None, "messages[0]", "an object"),
    (CHAT, {"model": MODEL, "messages": [{"content": "hi"}]}, 400, None, "messages[0].role", "role"),
    (CHAT, {"model": MODEL, "messages": [{"role": "user"}]}, 400, None, "messages[0].content", "null"),
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": 5}]}, 400, None, "messages[0].content", "5"),
    (
        CHAT,
        {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "unsupported",
        "messages[0].content[0].type",
        "image_url",
    ),
    (CHAT, {"model": MODEL, "messages": [{"role": "tool", "content": "x"}]}, 400, "unsupported", None, "tool"),
    (CHAT, chat_body(tools=[{"type": "function"}]), 400, "unsupported_field", "tools", "tools"),
    (CHAT, chat_body(functions=[{}]), 400, "unsupported_field", "functions", "functions"),
    (CHAT, chat_body(response_format={"type": "json_object"}), 400, "unsupported_field", "response_format", "not"),
    (CHAT, chat_body(audio={"voice": "a"}), 400, "unsupported_field", "audio", "audio"),
    (CHAT, chat_body(service_tier="priority"), 400, "unsupported_field", "service_tier", "not supported"),
    (CHAT, chat_body(store=True), 400, "unsupported_field", "store", "store"),
    (CHAT, chat_body(reasoning_effort="high"), 400, "unsupported_field", "reasoning_effort", "not supported"),
    (CHAT, chat_body(cache_salt=""), 400, None, "cache_salt", "0 characters"),
    (CHAT, chat_body(cache_salt="s" * 129), 400, None, "cache_salt", "129"),
    (CHAT, chat_body(cache_salt=["s"]), 400, "invalid_type", "cache_salt", "a string"),
    (CHAT, chat_body(cache_salt="a\nb"), 400, None, "cache_salt", "control"),
    (CHAT, chat_body(user="a", safety_identifier="b"), 400, "conflicting_user", "user", "different users"),
    (CHAT, chat_body(user=""), 400, None, "user", "0 characters"),
    (CHAT, chat_body(user={"id": 1}), 400, "invalid_type", "user", "an object"),
    (CHAT, chat_body(session_id="x" * 129), 400, None, "session_id", "129"),
    (CHAT, chat_body(prompt_cache_key=""), 400, None, "prompt_cache_key", "0"),
    (CHAT, chat_body(prompt={"id": 5}), 400, "invalid_type", "prompt.id", "a string"),
    (TEXT, {"model": MODEL}, 400, None, "prompt", "prompt"),
    (TEXT, text_body(""), 400, None, "prompt", "empty"),
    (TEXT, text_body([]), 400, None, "prompt", "not empty"),
    (TEXT, text_body([[]]), 400, None, "prompt", "empty"),
    (TEXT, text_body([1, "a"]), 400, None, "prompt[0]", "1"),
    (TEXT, text_body([-1]), 400, None, "prompt", "-1"),
    (TEXT, text_body([VOCAB_SIZE]), 400, None, "prompt", str(VOCAB_SIZE)),
    (TEXT, text_body([True]), 400, None, "prompt[0]", "true"),
    (TEXT, text_body(["a"] * 129), 400, None, "prompt", "129"),
    (TEXT, text_body(["a"] * 65, n=2), 400, None, "n", "65"),
    (TEXT, text_body(echo=True), 400, "unsupported_field", "echo", "echo"),
    (TEXT, text_body(best_of=3), 400, "unsupported_field", "best_of", "best_of"),
    (TEXT, text_body(best_of=True), 400, "unsupported_field", "best_of", "best_of"),
    (TEXT, text_body(suffix="x"), 400, "unsupported_field", "suffix", "suffix"),
    (TEXT, text_body(logprobs=True), 400, "invalid_type", "logprobs", "an integer"),
    (TEXT, text_body(logprobs=21), 400, None, "logprobs", "21"),
    (RESPONSES, {"model": MODEL}, 400, None, "input", "required"),
    (RESPONSES, responses_body(5), 400, None, "input", "5"),
    (RESPONSES, responses_body([{"type": "function_call"}]), 400, "unsupported", "input[0].type", "function_call"),
    (RESPONSES, responses_body(previous_response_id="r"), 400, "unsupported_field", "previous_response_id", "not"),
    (RESPONSES, responses_body(background=True), 400, "unsupported_field", "background", "not"),
    (RESPONSES, responses_body(n=2), 400, None, "n", "2"),
    ("/tokenize", {"model": MODEL}, 400, None, "prompt", "required"),
    ("/tokenize", {"model": MODEL, "prompt": 5}, 400, None, "prompt", "required"),
    ("/detokenize", {"model": MODEL, "tokens": [VOCAB_SIZE]}, 400, None, "tokens", "range"),
    ("/detokenize", {"model": MODEL, "tokens": "x"}, 400, "invalid_type", "tokens", "a list"),
]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend) -> Any:
    async with client_of(build_app(backend)) as client:
        yield client


def check(response: httpx.Response, status: int, code: str | None, param: str | None, word: str) -> None:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert word in error["message"]
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code
    assert response.headers["x-request-id"]
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("path", "body", "status", "code", "param", "word"), BAD_FIELDS)
async def test_a_bad_field_is_named(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    path: str,
    body: Any,
    status: int,
    code: str | None,
    param: str | None,
    word: str,
) -> None:
    check(await client.post(path, json=body), status, code, param, word)
    assert backend.requests == []
    assert (await client.post(CHAT, json=chat_body())).status_code == 200


def with_raw_temperature(text: str) -> bytes:
    return json.dumps(chat_body(temperature=12345)).replace("12345", text).encode()


RAW_BODIES: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"{", "line 1 column 2"),
    (b"[]", "a JSON object"),
    (b'"text"', "a JSON object"),
    (b"\xff\xfe", "UTF-8"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "UTF-8"),
    (with_raw_temperature("NaN"), "JSON: NaN is no number"),
    (with_raw_temperature("Infinity"), "Infinity is no number"),
    (with_raw_temperature("-Infinity"), "-Infinity is no number"),
    (with_raw_temperature("1e999"), "temperature is inf"),
    (with_raw_temperature("9" * 5000), "too many digits"),
    (b'{"a":' * 100_000, "nested too deeply"),
    (b"[" * 100_000, "nested too deeply"),
    (json.dumps(chat_body("a\ud800b")).encode(), "lone surrogate"),
    (json.dumps(chat_body("a\udfffb")).encode(), "lone surrogate"),
    (json.dumps(chat_body("a\0b")).encode(), "NUL"),
    (json.dumps(chat_body(cache_salt="a\0b")).encode(), "NUL"),
    (json.dumps({**chat_body(), "a\ud800": 1}).encode(), "lone surrogate"),
    (json.dumps(chat_body(user="alice"))[:-1].encode() + b', "user": "bob"}', "twice"),
]


@pytest.mark.parametrize(("raw", "word"), RAW_BODIES)
async def test_a_body_that_is_no_clean_json_is_refused(client: httpx.AsyncClient, raw: bytes, word: str) -> None:
    response = await client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    check(response, 400, None, None, word)


async def test_paired_surrogate_escapes_are_ordinary_characters(client: httpx.AsyncClient) -> None:
    raw = json.dumps(chat_body("🦊")).encode()
    assert b"\\ud83e" in raw
    response = await client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert response.json()["choices"][0]["message"]["content"] == "🦊"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_another_content_type_is_refused(client: httpx.AsyncClient, content_type: str) -> None:
    response = await client.post(CHAT, content=b"{}", headers={"content-type": content_type})
    check(response, 415, "unsupported_media_type", None, "application/json")


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_over_the_limit_is_refused_while_it_arrives(client: httpx.AsyncClient, is_declared: bool) -> None:
    sent = 0

    async def parts() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b" " * (1 << 20)

    content: Any = b" " * (11 << 20) if is_declared else parts()
    response = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
    check(response, 413, "body_too_large", None, "10000000")
    assert (await client.post(CHAT, json=chat_body())).status_code == 200


async def test_an_unknown_path_is_404_in_the_same_shape(client: httpx.AsyncClient) -> None:
    for path in ("/", "/v1/nope", "/v1/embeddings", "/v1/chat/completions/", "/docs", "/openapi.json"):
        check(await client.post(path, json={}), 404, "unknown_path", None, "nothing")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("OPTIONS", TEXT, "POST"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_405_and_says_which_is_right(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    response = await client.request(method, path)
    check(response, 405, "method_not_allowed", None, allowed)
    assert response.headers["allow"] == allowed


async def test_an_unknown_model_in_a_path_is_404(client: httpx.AsyncClient) -> None:
    check(await client.get("/v1/models/org/nope"), 404, "model_not_found", "model", "org/nope")


async def test_unknown_fields_pass(client: httpx.AsyncClient) -> None:
    body = chat_body(some_new_field={"a": 1}, metadata={"k": "v"}, service_tier="auto", tools=[], tool_choice="none")
    assert (await client.post(CHAT, json=body)).status_code == 200


async def test_an_error_never_quotes_the_prompt(client: httpx.AsyncClient) -> None:
    secret = "the passphrase is 7-plum-harbour"
    for body in (
        chat_body([secret]),
        chat_body({"text": secret}),
        {"model": MODEL, "messages": secret},
        {"model": MODEL, "messages": [secret]},
        chat_body(secret * 40),
    ):
        response = await client.post(CHAT, json=body)
        assert response.status_code == 400
        assert "plum" not in response.text


async def test_an_escape_below_deep_nesting_is_still_found(client: httpx.AsyncClient) -> None:
    """Whatever depth the parser lets through, the walk over it must not run out of stack."""
    for depth in (10, 300, 600, 900, 960, 980, 990):
        raw = b'{"model":"tiny","x":' + b"[" * depth + b'"\\u0000"' + b"]" * depth + b"}"
        response = await client.post(CHAT, content=raw, headers={"content-type": "application/json"})
        check(response, 400, None, None, "")
        assert "NUL" in response.text or "nested" in response.text


async def test_a_client_that_leaves_while_it_sends_is_no_bug_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError("nobody is there to read an answer")

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers, "client": None}
    await build_app(FakeBackend())(scope, receive, send)
    assert not [record for record in caplog.records if record.name == "watchword.http"]


class UncalledPrompts(BytePrompts):
    def tokens(self, identity: Any, token_ids: Any, *, share: Any = None) -> Any:
        raise AssertionError("a prompt that cannot fit was tokenized")


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
async def test_a_prompt_of_megabytes_is_refused_before_it_is_tokenized(path: str) -> None:
    text = "x" * 9_000_000
    body = {CHAT: chat_body(text), TEXT: text_body(text), RESPONSES: responses_body(text)}[path]
    async with client_of(build_app(FakeBackend(), prompts=UncalledPrompts())) as client:
        check(await client.post(path, json=body), 400, "context_length_exceeded", None, "9000000 characters")
