"""POST /v1/chat/completions and /v1/completions: body -> generations -> one JSON object or a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.api.ids import new_request_id
from cluster.http.config import HttpConfig
from cluster.http.context import CallContext, CallContexts
from cluster.http.event_stream import EventStream
from cluster.http.json_body import read_json
from cluster.http.until_disconnect import run_until_disconnect
from cluster.openai.chat_reply import ChatChunks, ChatReply
from cluster.openai.chat_wire import ChatCompletionRequest
from cluster.openai.completion_reply import CompletionChunks, CompletionReply
from cluster.openai.completion_wire import CompletionRequest
from cluster.openai.json_text import to_json_bytes
from cluster.openai.wire import GenerationWire
from cluster.serving.core import ServingCore
from cluster.serving.generate_input import GenerateInput
from cluster.serving.generation_group import GenerationGroup
from cluster.serving.text_delta import TextDelta, Usage


class Reply(Protocol):
    def add(self, delta: TextDelta) -> None: ...
    def finish(self, usage: Usage) -> dict[str, Any]: ...


class Chunks(Protocol):
    def start(self) -> Any: ...
    def chunk(self, delta: TextDelta, running_usage: Usage | None = None) -> str | None: ...
    def finish(self, usage: Usage) -> Any: ...


class GenerationRoutes:
    def __init__(self, core: ServingCore, config: HttpConfig) -> None:
        self._core = core
        self._config = config
        self._contexts = CallContexts(config)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]

    async def chat(self, request: Request) -> Response:
        call = self._contexts.of(request)
        wire = ChatCompletionRequest.parse(await read_json(request, self._config))
        group = await start_group(self._core, call, [wire.to_input(call.header_user)])
        head = (f"chatcmpl-{call.request_id}", wire.model, int(time.time()), group.num_choices)
        if wire.stream:
            return self._stream(call, wire, group, ChatChunks(*head, wants_usage=wire.wants_usage))
        return await self._answer(call, request, group, ChatReply(*head))

    async def complete(self, request: Request) -> Response:
        call = self._contexts.of(request)
        wire = CompletionRequest.parse(await read_json(request, self._config))
        group = await start_group(self._core, call, wire.to_inputs(call.header_user, self._config.max_prompts))
        head = (f"cmpl-{call.request_id}", wire.model, int(time.time()), group.num_choices)
        if wire.stream:
            return self._stream(call, wire, group, CompletionChunks(*head, wants_usage=wire.wants_usage))
        return await self._answer(call, request, group, CompletionReply(*head))

    def _stream(self, call: CallContext, wire: GenerationWire, group: GenerationGroup, chunks: Chunks) -> Response:
        events = stream_events(group, chunks, wants_running_usage=wire.wants_running_usage)
        return EventStream(events, late_headers=lambda: call.debug_headers(group))

    async def _answer(self, call: CallContext, request: Request, group: GenerationGroup, reply: Reply) -> Response:
        body = await run_until_disconnect(request.receive, collect(group, reply))
        return Response(to_json_bytes(body), headers=call.debug_headers(group), media_type="application/json")


async def start_group(core: ServingCore, call: CallContext, inputs: Sequence[GenerateInput]) -> GenerationGroup:
    """All prompts are checked before the first is started. Each generation has an internal id of its own."""
    prepared = [await core.prepare(call.principal, given) for given in inputs]
    deadline_unix_s = time.time() + call.timeout_s
    return GenerationGroup(
        [
            core.launch(item, call.request_id if index == 0 else new_request_id(), deadline_unix_s)
            for index, item in enumerate(prepared)
        ]
    )


async def collect(group: GenerationGroup, reply: Reply) -> Mapping[str, Any]:
    async with aclosing(group.deltas()) as deltas:
        async for delta in deltas:
            reply.add(delta)
    return reply.finish(group.usage)


async def stream_events(
    group: GenerationGroup, chunks: Chunks, *, wants_running_usage: bool
) -> AsyncGenerator[str, None]:
    has_started = False
    async with aclosing(group.deltas()) as deltas:
        async for delta in deltas:
            if not has_started:
                has_started = True
                for event in chunks.start():
                    yield event
            event = chunks.chunk(delta, group.usage if wants_running_usage else None)
            if event is not None:
                yield event
    for event in chunks.finish(group.usage):
        yield event
