"""The whole path, as a user meets it: real client, real cluster, real weights."""

from __future__ import annotations

import asyncio
import os
import uuid

import httpx
import openai
import psutil
import pytest
from e2e_server import PATIENCE_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.weights]

MODEL = "smollm2-135m-instruct"


def ask(client: openai.OpenAI, text: str, **options):
    options = {"max_tokens": 16, "temperature": 0, **options}
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], **options)


def long_text(words: int = 120) -> str:
    """A prompt of several blocks that no other test has sent."""
    return f"{uuid.uuid4().hex} " + " ".join(f"fact {number}: the river is long." for number in range(words // 6))


def test_a_chat_answers_and_is_deterministic_at_temperature_zero(cluster):
    client = cluster.client(cluster.keys.alice)
    first = ask(client, "What is the capital of France?")
    second = ask(client, "What is the capital of France?")
    assert "Paris" in first.choices[0].message.content
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.usage.prompt_tokens > 0
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole_answer(cluster):
    client = cluster.client(cluster.keys.alice)
    whole = ask(client, "Name three rivers of Europe.", max_tokens=24)
    stream = ask(
        client, "Name three rivers of Europe.", max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert text == whole.choices[0].message.content
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_the_same_user_hits_the_cache_and_nobody_else_does(cluster):
    prompt = long_text()
    assert ask(cluster.client(cluster.keys.alice), prompt).usage.prompt_tokens_details.cached_tokens < 32
    again = ask(cluster.client(cluster.keys.alice), prompt)
    assert again.usage.prompt_tokens_details.cached_tokens >= 128  # the control: reuse does happen
    shared_head = again.usage.prompt_tokens_details.cached_tokens
    for key in (cluster.keys.bob, cluster.keys.other_tenant, cluster.keys.delegate):
        foreign = ask(cluster.client(key), prompt)
        assert foreign.usage.prompt_tokens_details.cached_tokens < 32 < shared_head
        assert foreign.choices[0].message.content == again.choices[0].message.content


def test_a_cache_salt_narrows(cluster):
    client, prompt = cluster.client(cluster.keys.alice), long_text()
    ask(client, prompt, extra_body={"cache_salt": "one"})
    assert ask(client, prompt, extra_body={"cache_salt": "two"}).usage.prompt_tokens_details.cached_tokens < 32
    assert ask(client, prompt, extra_body={"cache_salt": "one"}).usage.prompt_tokens_details.cached_tokens >= 128


async def test_a_returning_conversation_goes_back_to_its_worker_and_load_spreads(cluster):
    headers = {"Authorization": f"Bearer {cluster.keys.delegate}"}
    async with httpx.AsyncClient(base_url=cluster.server.url, headers=headers, timeout=PATIENCE_S) as client:

        async def turn(user: int, prompt: str) -> tuple[str, int]:
            messages = [{"role": "user", "content": prompt}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 24, "user": f"spread-{user}"}
            response = await client.post("/v1/chat/completions", json=body)
            cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return response.headers["x-watchword-worker"], cached

        prompts = [long_text() for _ in range(6)]
        first = await asyncio.gather(*(turn(user, prompt) for user, prompt in enumerate(prompts)))
        assert len({worker for worker, _ in first}) == 2
        await asyncio.sleep(0.5)
        for user, prompt in enumerate(prompts):
            worker, cached = await turn(user, prompt)
            assert worker == first[user][0]
            assert cached >= 128


async def test_eight_users_at_once_each_get_their_own_answer(cluster):
    """Every user's concurrent answer equals the one it gets alone."""
    client = openai.AsyncOpenAI(base_url=f"{cluster.server.url}/v1", api_key=cluster.keys.delegate, max_retries=0)

    async def one(user: int) -> str:
        messages = [{"role": "user", "content": f"My number is {user * 7919}. Repeat my number and count up from it."}]
        reply = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=32, temperature=0, user=f"user-{user}"
        )
        return reply.choices[0].message.content

    alone = [await one(user) for user in range(8)]
    for _ in range(3):
        assert await asyncio.gather(*(one(user) for user in range(8))) == alone


def test_completions_n_logprobs_stop_and_seed(cluster):
    client = cluster.client(cluster.keys.alice)
    reply = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, n=3, seed=7, logprobs=2)
    again = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, n=3, seed=7, logprobs=2)
    assert [choice.text for choice in reply.choices] == [choice.text for choice in again.choices]
    assert len({choice.text for choice in reply.choices}) > 1
    assert len(reply.choices[0].logprobs.tokens) == 8
    stopped = ask(client, "Count: one two three four five six", stop=["three"], max_tokens=40)
    assert "three" not in stopped.choices[0].message.content


def test_models_health_ready_metrics(cluster):
    client = cluster.client(cluster.keys.alice)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with httpx.Client(base_url=cluster.server.url, timeout=PATIENCE_S) as plain:
        assert plain.get("/health").status_code == 200
        assert plain.get("/ready").status_code == 200
        assert plain.get("/metrics").status_code == 401
        assert plain.get("/metrics", headers={"Authorization": f"Bearer {cluster.keys.alice}"}).status_code == 403
        metrics = plain.get("/metrics", headers={"Authorization": f"Bearer {cluster.keys.operator}"})
    assert metrics.status_code == 200
    assert "watchword_" in metrics.text
    assert "alice" not in metrics.text
    assert "acme" not in metrics.text


def test_a_disconnect_frees_blocks_and_reservation(cluster):
    headers = {"Authorization": f"Bearer {cluster.keys.alice}"}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    with (
        httpx.Client(base_url=cluster.server.url, headers=headers, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
    wait_until(lambda: is_idle(cluster), "the end of what nobody reads", 10)


def is_idle(cluster) -> bool:
    operator = {"Authorization": f"Bearer {cluster.keys.operator}"}
    metrics = httpx.get(f"{cluster.server.url}/metrics", headers=operator, timeout=PATIENCE_S).text
    return gauge(metrics, "watchword_requests_running") == gauge(metrics, "watchword_reservations") == 0


def gauge(metrics: str, name: str) -> float:
    """Sum of a metric over its labels; fails when it is not there at all."""
    values = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith((name + " ", name + "{"))]
    assert values, f"{name} is not among the metrics"
    return sum(values)


def test_engines_go_before_everything_else(cluster):
    """Of the running service: a worker has threads that nothing of ours cuts into, a gateway and the router none."""

    def has_first_thread(process: psutil.Process) -> bool:
        return any(os.sched_getscheduler(thread.id) == os.SCHED_OTHER for thread in process.threads())

    def goes_first(name: str) -> set[bool]:
        return {has_first_thread(process) for process in cluster.server.find(name)}

    def is_in_order() -> bool:
        try:
            found = [goes_first(f"ServeReplica:watchword:{name}") for name in ("Worker", "Gateway")]
            return [*found, goes_first("RouterActor")] == [{True}, {False}, {False}]
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False  # a thread came and went

    wait_until(is_in_order, "the order of precedence")
