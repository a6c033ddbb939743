"""The experiment against an OpenAI-compatible server over HTTP, seen from outside only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from aiohttp import web

from cluster.experiment.plan import make_plan
from cluster.experiment.runner import run_experiment
from cluster.experiment.targets.url import UrlTarget
from cluster.experiment.verdict import Status
from cluster.experiment.workload import Workload

PLAN = make_plan(3, 4, replace(Workload(), abort_fraction=0.5))


class Server:
    """Answers with the marker of each prompt, over half a dozen chunks; `leak` may add to an answer."""

    def __init__(self, leak: Callable[[list[str]], str] = lambda earlier: "") -> None:
        self._leak = leak
        self._earlier: list[str] = []
        self.num_hung_up = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        markers = [request.marker for planned in PLAN.rounds for request in planned.requests]
        own = next((marker for marker in markers if marker in json.dumps(body["messages"])), "none")
        pieces = [own[:3], own[3:], ".", " Yes", ".", self._leak(self._earlier)]
        self._earlier.append(own)
        usage = {"prompt_tokens": 9, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4}}
        if not body.get("stream"):
            await asyncio.sleep(0.1)
            logprobs = {"content": [{"token": piece, "top_logprobs": []} for piece in pieces]}
            choice = {"message": {"content": "".join(pieces)}, "finish_reason": "stop", "logprobs": logprobs}
            return web.json_response({"choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for piece in pieces:
                chunk = {"choices": [{"delta": {"content": piece}}]}
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
                await asyncio.sleep(0.02)
            await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        except (ConnectionResetError, asyncio.CancelledError):
            self.num_hung_up += 1
            raise
        return response


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Server], object]]:
    runners = []

    async def start(server: Server) -> UrlTarget:
        runner = web.AppRunner(server.app(), handler_cancellation=True)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        target = UrlTarget(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        await target.connect()
        return target

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_an_isolated_server_is_clean(serve) -> None:
    server = Server()
    target = await serve(server)
    result = await run_experiment(target, PLAN)
    await target.close()
    assert result.verdict.status is Status.CLEAN, result.verdict.reasons
    assert result.info.model == "m"
    assert result.verdict.own_rate["en"].value == 1
    assert result.verdict.shared_rate is not None
    assert result.controls["same user, same prompt: cached tokens"] == "4"
    aborted = [request for planned in PLAN.rounds for request in planned.requests if request.abort_after_tokens]
    assert aborted
    assert server.num_hung_up > 0


async def test_a_marker_of_an_earlier_request_is_found(serve) -> None:
    target = await serve(Server(leak=lambda earlier: earlier[0].lower() if len(earlier) > 8 else ""))
    result = await run_experiment(target, PLAN)
    await target.close()
    assert result.verdict.status is Status.CONTAMINATED
    assert {finding.evidence["owner"] for finding in result.findings} == {PLAN.rounds[0].requests[0].name}


async def test_a_dead_server_is_an_error_of_its_own() -> None:
    target = UrlTarget("http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match="no server"):
        await target.connect()
    await target.close()


async def test_a_server_that_dies_in_the_middle_gives_observations_not_exceptions(serve) -> None:
    target = await serve(Server())
    broken = UrlTarget("http://127.0.0.1:9", model="m")
    await broken.connect()
    seen = await broken.run_round(PLAN.rounds[0])
    assert all(found.error for found in seen.by_name.values())
    await broken.close()
    await target.close()
