"""A client that goes away stops its generation at once; over real sockets, with the real server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from front_door import MODEL, FakeBackend, build_app, chat_body

from cluster.http.front import Front


@asynccontextmanager
async def served(app: Front) -> AsyncIterator[str]:
    """The address of a real server on a free port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_keep_alive=600))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.005)


def client_at(address: str) -> httpx.AsyncClient:
    """Without a time limit of its own: it would leave before the test says so."""
    return httpx.AsyncClient(base_url=address, timeout=None)


BODIES = {
    "chat stream": ("/v1/chat/completions", chat_body("hello there", stream=True)),
    "chat": ("/v1/chat/completions", chat_body("hello there")),
    "several prompts, streamed": (
        "/v1/completions",
        {"model": MODEL, "prompt": ["hello there", "good night"], "stream": True},
    ),
    "several prompts": ("/v1/completions", {"model": MODEL, "prompt": ["hello there", "good night"]}),
    "response stream": ("/v1/responses", {"model": MODEL, "input": "hello there", "stream": True}),
    "response": ("/v1/responses", {"model": MODEL, "input": "hello there"}),
}


@pytest.mark.parametrize("kind", BODIES)
async def test_a_disconnect_aborts_while_the_engine_is_silent(kind: str) -> None:
    """The engine holds after the first piece, so nothing but the watch on the connection can notice."""
    path, body = BODIES[kind]
    backend = FakeBackend(max_piece=2, hold=asyncio.Event())
    async with served(build_app(backend)) as address, client_at(address) as client:
        task = asyncio.create_task(read_all(client, path, body))
        num_requests = 2 if "prompts" in kind else 1
        await until(lambda: len(backend.requests) == num_requests)
        await asyncio.sleep(0.05)
        assert backend.num_running == num_requests
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: backend.num_running == 0)  # nobody sets `hold`, nor is there a deadline yet
        assert backend.num_aborted == num_requests


@pytest.mark.parametrize("kind", BODIES)
async def test_a_client_that_stays_is_not_aborted(kind: str) -> None:
    """The other half of the pair: the same requests run to their end."""
    path, body = BODIES[kind]
    backend = FakeBackend(max_piece=2)
    async with served(build_app(backend)) as address, client_at(address) as client:
        text = await read_all(client, path, body)
    assert "error" not in text or "response" in kind
    assert (backend.num_running, backend.num_aborted) == (0, 0)


async def read_all(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        return "".join([chunk async for chunk in response.aiter_text()])


async def test_a_disconnect_of_one_leaves_the_others_alone() -> None:
    backend = FakeBackend(max_piece=1, hold=(hold := asyncio.Event()))
    async with served(build_app(backend)) as address, client_at(address) as client:
        texts = [f"marker-{index}-é你🦊" for index in range(8)]
        tasks = [
            asyncio.create_task(read_all(client, "/v1/chat/completions", chat_body(text, user=text))) for text in texts
        ]
        await until(lambda: len(backend.requests) == 8)
        tasks[3].cancel()
        await until(lambda: backend.num_running == 7)
        hold.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: backend.num_running == 0)
    assert backend.num_aborted == 1
    for index, answer in enumerate(answers):
        if index == 3:
            continue
        assert isinstance(answer, str)
        assert [text in answer for text in texts] == [other == index for other in range(8)]


async def test_a_deadline_ends_the_generation() -> None:
    backend = FakeBackend(max_piece=2, hold=asyncio.Event())
    app = build_app(backend, request_timeout_s=0.1)
    async with served(app) as address, client_at(address) as client:
        whole = await client.post("/v1/chat/completions", json=chat_body("hello there"))
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
        stream = await client.post("/v1/chat/completions", json=chat_body("hello there", stream=True))
        assert stream.status_code == 200
        assert "deadline_exceeded" in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")
    assert (backend.num_running, backend.num_aborted) == (0, 2)
