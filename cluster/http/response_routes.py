"""POST /v1/responses, stateless: created and streamed, never stored."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.http.config import HttpConfig
from cluster.http.context import CallContexts
from cluster.http.event_stream import EventStream
from cluster.http.generation_routes import collect, start_group, stream_events
from cluster.http.json_body import read_json
from cluster.http.until_disconnect import run_until_disconnect
from cluster.openai.json_text import to_json_bytes
from cluster.openai.response_reply import ResponseEvents, ResponseReply
from cluster.openai.response_wire import ResponsesRequest
from cluster.serving.core import ServingCore


class ResponseRoutes:
    def __init__(self, core: ServingCore, config: HttpConfig) -> None:
        self._core = core
        self._config = config
        self._contexts = CallContexts(config)

    def routes(self) -> list[Route]:
        return [Route("/v1/responses", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        call = self._contexts.of(request)
        wire = ResponsesRequest.parse(await read_json(request, self._config))
        group = await start_group(self._core, call, [wire.to_input(call.header_user)])
        reply = ResponseReply(call.request_id, wire, int(time.time()))
        if wire.stream:
            events = ResponseEvents(reply)
            return EventStream(
                stream_events(group, events, wants_running_usage=False),
                late_headers=lambda: call.debug_headers(group),
                frame_error=events.fail,
                tail=b"",  # this API's streams end with their last typed event
            )
        body: Any = await run_until_disconnect(request.receive, collect(group, reply))
        return Response(to_json_bytes(body), headers=call.debug_headers(group), media_type="application/json")
