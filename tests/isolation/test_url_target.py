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
ROUND_OF = {request.marker: planned for planned in PLAN.rounds for request in planned.requests}
ABORTED = {one.marker for planned in PLAN.rounds for one in planned.requests if one.abort_after_tokens}
PATIENCE_S = 120.0  # only a test that fails waits so long


class Server:
    """Answers with the marker of each prompt, over half a dozen chunks; `leak` may add to an answer.

    Gives the last chunk when the whole round has asked, so that its requests overlap, and none to whom is to hang up.
    """

    def __init__(self, leak: Callable[[list[str]], str] = lambda earlier: "") -> None:
        self._leak = leak
        self._earlier: list[str] = []
        self._arrival = asyncio.Condition()
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
        own = next((marker for marker in ROUND_OF if marker in json.dumps(body["messages"])), "none")
        pieces = [own[:3], own[3:], ".", " Yes", ".", self._leak(self._earlier)]
        async with self._arrival:
            self._earlier.append(own)
            self._arrival.notify_all()
        usage = {"prompt_tokens": 9, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4}}
        if not body.get("stream"):
            await self._all_have_come(own)
            logprobs = {"content": [{"token": piece, "top_logprobs": []} for piece in pieces]}
            choice = {"message": {"content": "".join(pieces)}, "finish_reason": "stop", "logprobs": logprobs}
            return web.json_response({"choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number, piece in enumerate(pieces, start=1):
                if number == len(pieces):
                    await self._all_have_come(own)
                chunk = {"choices": [{"delta": {"content": piece}}]}
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            if own in ABORTED:
                await asyncio.sleep(PATIENCE_S)
            await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        except (ConnectionResetError, asyncio.CancelledError):
            self.num_hung_up += 1
            raise
        return response

    async def _all_have_come(self, own: str) -> None:
        if own in ROUND_OF:
            markers = {request.marker for request in ROUND_OF[own].requests}
            async with self._arrival, asyncio.timeout(PATIENCE_S):
                await self._arrival.wait_for(lambda: markers <= set(self._earlier))


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
    assert ABORTED
    async with asyncio.timeout(PATIENCE_S):
        while server.num_hung_up < len(ABORTED):  # noqa: ASYNC110 - the server hears of it when it does
            await asyncio.sleep(0.001)


async def test_a_marker_of_an_earlier_request_is_found(serve) -> None:
    first = PLAN.rounds[0].requests[0]
    target = await serve(Server(leak=lambda earlier: first.marker.lower() if len(earlier) > 8 else ""))
    result = await run_experiment(target, PLAN)
    await target.close()
    assert result.verdict.status is Status.CONTAMINATED
    assert {finding.evidence["owner"] for finding in result.findings} == {first.name}


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
