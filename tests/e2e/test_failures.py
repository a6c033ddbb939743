"""What dies comes back, and what was asked meanwhile is answered or refused with one clear error."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from test_chat import MODEL, ask, long_text

pytestmark = [pytest.mark.e2e, pytest.mark.weights]


def wait_until(condition, timeout_s: float, what: str):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.2)
    raise AssertionError(f"{what} did not happen within {timeout_s} s")


def test_a_killed_worker_costs_no_answer_and_comes_back(cluster):
    """Streams that run on the killed worker go on, bit for bit, on the other one."""
    client = cluster.client(cluster.keys.delegate)
    prompts = [f"Question {number}: tell me a story about the number {number}." for number in range(6)]
    expected = [
        ask(client, text, max_tokens=160, user=f"u{i}").choices[0].message.content for i, text in enumerate(prompts)
    ]
    answers: dict[int, str] = {}
    started = threading.Barrier(len(prompts) + 1)

    def run(number: int) -> None:
        text = ""
        stream = ask(client, prompts[number], max_tokens=160, user=f"u{number}", stream=True)
        for position, chunk in enumerate(stream):
            if position == 3:
                started.wait(60)
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        answers[number] = text

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    started.wait(60)
    victims = cluster.server.find("ServeReplica:watchword:Worker")
    assert len(victims) == 2
    os.kill(victims[0].pid, signal.SIGKILL)
    for thread in threads:
        thread.join(90)
    assert [answers[number] for number in range(len(prompts))] == expected
    wait_until(lambda: len(cluster.server.find("ServeReplica:watchword:Worker")) == 2, 60, "a new worker process")
    wait_until(lambda: cluster.server.num_workers() == 2, 60, "two ready workers")
    assert ask(client, "Still there?").choices[0].message.content


def test_a_killed_redis_costs_nothing_and_the_index_heals(cluster):
    client = cluster.client(cluster.keys.alice)
    redis = cluster.server.find("valkey") or cluster.server.find("redis-server")
    assert redis, "no Redis process among the server's children"
    os.kill(redis[0].pid, signal.SIGKILL)
    for _ in range(5):
        assert ask(client, long_text()).choices[0].message.content is not None
    wait_until(lambda: cluster.server.find("valkey") or cluster.server.find("redis-server"), 20, "a new Redis")

    def conversation_sticks() -> bool:
        """The index works again: three returns of a conversation meet the worker that holds it."""
        prompt, cached = long_text(), []
        for _ in range(3):
            cached.append(ask(client, prompt).usage.prompt_tokens_details.cached_tokens)
            time.sleep(0.3)
        return cached[1] >= 128 and cached[2] >= 128

    wait_until(conversation_sticks, 30, "a healed index")


def test_twenty_bad_inputs_get_a_clear_error_and_break_nothing(cluster):
    import httpx

    chat, text = "/v1/chat/completions", [{"role": "user", "content": "hi"}]
    good = {"model": MODEL, "messages": text, "max_tokens": 2}
    bad: list[tuple[dict | bytes, int]] = [
        ({**good, "messages": "hi"}, 400),
        ({**good, "messages": []}, 400),
        ({**good, "messages": [{"role": "king", "content": "hi"}]}, 400),
        ({**good, "messages": [{"role": "user", "content": 5}]}, 400),
        ({**good, "messages": [{"role": "user", "content": "x " * 20000}]}, 400),
        ({**good, "max_tokens": -1}, 400),
        ({**good, "max_tokens": 0.5}, 400),
        ({**good, "max_tokens": True}, 400),
        ({**good, "temperature": -0.1}, 400),
        ({**good, "temperature": "hot"}, 400),
        ({**good, "top_p": 1.5}, 400),
        ({**good, "n": 0}, 400),
        ({**good, "stop": ["a"] * 1000}, 400),
        ({**good, "seed": "x"}, 400),
        ({**good, "logit_bias": {"999999": 1}}, 400),
        ({**good, "model": "nobody"}, 404),
        ({**good, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400),
        ({**good, "response_format": {"type": "json_object"}}, 400),
        ({**good, "cache_salt": ""}, 400),
        ({**good, "user": "a", "safety_identifier": "b"}, 400),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"temperature": NaN}', 400),
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b"x" * ((10 << 20) + 1), 413),
    ]
    headers = {"Authorization": f"Bearer {cluster.keys.delegate}", "Content-Type": "application/json"}
    with httpx.Client(base_url=cluster.server.url, headers=headers, timeout=60) as client:
        for body, status in bad:
            options = {"content": body} if isinstance(body, bytes) else {"json": body}
            response = client.post(chat, **options)
            assert response.status_code == status, (str(body)[:120], response.text[:300])
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert "Traceback" not in response.text
            assert ".py" not in response.text
            assert response.headers["x-request-id"]
        assert client.get("/v1/nowhere").json()["error"]["code"]
        assert client.get("/v1/nowhere").status_code == 404
        assert client.get(chat).status_code == 405
        wrong = client.post(chat, json=good, headers={"Authorization": "Bearer no.key"})
        assert wrong.status_code == 401
        assert wrong.json()["error"]["code"]
        assert client.post(chat, json=good).status_code == 200
