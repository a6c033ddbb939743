"""What eleven real clients sent, replayed, and a real vLLM's answers, field by field. Needs the data folder."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from front_door import MODEL, FakeBackend, build_app, chat_body, client_of

FOLDER = Path(os.environ.get("WATCHWORD_SHARED", Path(__file__).parents[3] / "shared")) / "golden"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the data folder is not there: {FOLDER}"),
]

# What the recording abbreviated, by field and path.
LISTS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "prompt": ["hello"],
    "input": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": {"name": "A"}}],
}
# Asked for, known and not built: refused by name.
UNBUILT = {"response_format", "tools"}


def recorded() -> list[dict[str, Any]]:
    lines = (FOLDER / "client_requests.jsonl").read_text().splitlines() if FOLDER.is_dir() else []
    return [json.loads(line) for line in lines]


def restore(body: dict[str, Any]) -> dict[str, Any]:
    restored = {name: LISTS[name] if value == "list" else value for name, value in body.items()}
    return {**restored, "model": MODEL} if "model" in body else restored


@pytest.mark.parametrize("number", range(len(recorded())))
async def test_what_a_real_client_sent_is_answered(number: int) -> None:
    call = recorded()[number]
    body = restore(call["b"])
    headers = {name: value for name, value in call["h"].items() if name != "accept-encoding"}
    async with client_of(build_app(FakeBackend())) as client:
        path = call["p"].replace("mock", MODEL)
        response = await client.request(call["m"], path, json=body or None, headers=headers)
    if path in ("/v1/nope", "/v1/embeddings"):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_path")
    elif UNBUILT & body.keys():
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_field")
        assert response.json()["error"]["param"] in UNBUILT
    elif body.get("user", "") != body.get("safety_identifier", body.get("user", "")):
        assert (response.status_code, response.json()["error"]["code"]) == (400, "conflicting_user")
    elif call["m"] == "POST" and not body:
        assert response.status_code == 400
    else:
        assert response.status_code == 200, response.text
        if body.get("stream") and "responses" not in path:
            assert response.text.endswith("data: [DONE]\n\n")


def vllm_answer(name: str) -> Any:
    """The JSON body of a recorded exchange; for a stream the list of its events."""
    text = (FOLDER / "vllm_cpu_0.32_http.txt").read_text()
    section = re.search(rf"^### {name}\n(.*?)(?=^### |\Z)", text, re.S | re.M)
    assert section is not None
    content = section[1].split("\n\n", 1)[1]
    if content.startswith("data: "):
        events = [line.removeprefix("data: ") for line in content.split("\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]
    return json.loads(content.strip())


async def ours(path: str, body: dict[str, Any]) -> Any:
    async with client_of(build_app(FakeBackend())) as client:
        response = await client.post(path, json=body)
    if body.get("stream"):
        events = response.text.removesuffix("data: [DONE]\n\n").split("\n\n")
        return [json.loads(event.removeprefix("data: ")) for event in events if event]
    return response.json()


# Fields that vLLM fills with null or with what it alone has.
ITS_OWN = {
    "annotations", "audio", "created_cache_tokens", "ec_transfer_params", "function_call", "kv_transfer_params",
    "metrics", "multimodal_tokens", "prompt_logprobs", "prompt_text", "prompt_token_ids", "reasoning",
    "routed_experts", "service_tier", "system_fingerprint", "token_ids", "permission", "completion_tokens_details",
}  # fmt: skip


def missing(theirs: Any, mine: Any, where: str = "") -> set[str]:
    """Paths that vLLM's answer has and ours lacks, or has with another JSON type."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        found = set()
        for name in theirs.keys() - ITS_OWN:
            path = f"{where}.{name}"
            found |= {path} if name not in mine else missing(theirs[name], mine[name], path)
        return found
    if isinstance(theirs, list) and isinstance(mine, list):
        return missing(theirs[0], mine[0], f"{where}[]") if theirs and mine else set()
    is_same = theirs is None or mine is None or isinstance(mine, type(theirs)) or isinstance(theirs, type(mine))
    return set() if is_same else {f"{where}: {type(theirs).__name__} / {type(mine).__name__}"}


async def test_our_chunks_have_every_field_of_vllms() -> None:
    theirs = vllm_answer("stream")
    mine = await ours("/v1/chat/completions", chat_body(stream=True, stream_options={"include_usage": True}))
    for position in (0, 1, -1):
        assert missing(theirs[position], mine[position]) == set()
    # In the last text chunk, vLLM repeats the stop reason.
    assert missing(theirs[2], mine[-2]) <= {".choices[].stop_reason"}


async def test_our_answers_have_every_field_of_vllms() -> None:
    assert missing(vllm_answer("json_schema"), await ours("/v1/chat/completions", chat_body())) == set()
    cut = await ours("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 2})
    assert missing(vllm_answer("responses"), cut) <= {
        ".input_messages", ".output[].phase", ".output_messages", ".usage.input_tokens_details.cache_write_tokens",
        ".usage.input_tokens_details.cached_tokens_per_turn", ".usage.input_tokens_details.input_tokens_per_turn",
        ".usage.output_tokens_details.output_tokens_per_turn", ".usage.output_tokens_details.tool_output_tokens",
        ".usage.output_tokens_details.tool_output_tokens_per_turn",
    }  # fmt: skip


async def test_the_comparison_sees_a_missing_field() -> None:
    mine = await ours("/v1/chat/completions", chat_body())
    del mine["usage"]["total_tokens"]
    assert missing(vllm_answer("json_schema"), mine) == {".usage.total_tokens"}


async def test_models_and_tokenize_have_every_field_of_vllms() -> None:
    async with client_of(build_app(FakeBackend())) as client:
        assert missing(vllm_answer("models"), (await client.get("/v1/models")).json()) == set()
        tokens = await client.post("/tokenize", json={"model": MODEL, "prompt": "hello"})
        assert missing(vllm_answer("401_tokenize_open"), tokens.json()) == set()


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("404_model", "/v1/chat/completions", {**chat_body(), "model": "nope"}),
        ("400_type", "/v1/chat/completions", {"model": MODEL, "messages": "x"}),
        ("400_temp", "/v1/chat/completions", chat_body(temperature=-1)),
        ("400_ctx", "/v1/chat/completions", chat_body(max_tokens=99999)),
        ("400_emptysalt", "/v1/chat/completions", chat_body(cache_salt="")),
    ],
)
async def test_errors_have_the_same_shape_with_a_code_that_is_a_word(name: str, path: str, body: Any) -> None:
    theirs, mine = vllm_answer(name)["error"], (await ours(path, body))["error"]
    assert theirs.keys() == mine.keys()
    assert mine["param"] == theirs["param"].removeprefix("body.")
    assert isinstance(mine["code"], str)
