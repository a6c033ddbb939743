"""What dies comes back, and what was asked meanwhile is answered or refused with one clear error."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2e_server import PATIENCE_S, wait_until
from test_chat import MODEL, ask, long_text

pytestmark = [pytest.mark.e2e, pytest.mark.weights]


def test_a_killed_worker_costs_no_answer_and_comes_back(cluster):
    """Streams that run on the killed worker go on, bit for bit, on the other one."""
    client = cluster.client(cluster.keys.delegate)
    prompts = [f"Question {number}: tell me a story about the number {number}." for number in range(6)]
    expected = [
        ask(client, text, max_tokens=96, user=f"u{i}").choices[0].message.content for i, text in enumerate(prompts)
    ]
    started = threading.Barrier(len(prompts) + 1)

    def run(number: int) -> str:
        text = ""
        stream = ask(client, prompts[number], max_tokens=96, user=f"u{number}", stream=True)
        for position, chunk in enumerate(stream):
            if position == 3:
                started.wait(PATIENCE_S)
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        return text

    victims = cluster.server.find("ServeReplica:watchword:Worker")
    assert len(victims) == 2
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(run, number) for number in range(len(prompts))]
        started.wait(PATIENCE_S)
        os.kill(victims[0].pid, signal.SIGKILL)  # at once: the streams run on
        assert [answer.result() for answer in answers] == expected
    wait_until(lambda: len(cluster.server.find("ServeReplica:watchword:Worker")) == 2, "a new worker process", 60)
    wait_until(lambda: cluster.server.num_workers() == 2, "two ready workers", 60)
    assert ask(client, "Still there?").choices[0].message.content


def test_a_killed_redis_costs_nothing_and_the_index_heals(cluster):
    client = cluster.client(cluster.keys.alice)
    redis = cluster.server.find("valkey") or cluster.server.find("redis-server")
    assert redis, "no Redis process among the server's children"
    os.kill(redis[0].pid, signal.SIGKILL)
    for _ in range(5):
        assert ask(client, long_text()).choices[0].message.content is not None
    wait_until(lambda: cluster.server.find("valkey") or cluster.server.find("redis-server"), "a new Redis", 20)

    def conversation_sticks() -> bool:
        """The index works again: three returns of a conversation meet the worker that holds it."""
        prompt, cached = long_text(), []
        for _ in range(3):
            cached.append(ask(client, prompt).usage.prompt_tokens_details.cached_tokens)
            time.sleep(0.3)
        return cached[1] >= 128 and cached[2] >= 128

    wait_until(conversation_sticks, "a healed index", 30)


def test_twenty_bad_inputs_get_a_clear_error_and_break_nothing(cluster):
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
    with httpx.Client(base_url=cluster.server.url, headers=headers, timeout=PATIENCE_S) as client:
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
