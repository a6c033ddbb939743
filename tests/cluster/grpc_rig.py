"""A gRPC front door over the real serving core, with one byte per token and a backend that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from cache_service.block_key import BlockKeyer, ModelIdentity
from cluster.api.errors import WatchwordError
from cluster.api.output import ChoiceDelta, FinishReason, RequestOutput, TokenLogprob
from cluster.api.prompt import BuiltPrompt, CallerIdentity, PromptRef
from cluster.api.request import Request
from cluster.api.scope import ScopeSpan
from cluster.auth.authenticator import Authenticator
from cluster.auth.proxy import IdentityHeaders
from cluster.backend import ModelInfo, Placement
from cluster.grpc_server import GrpcServer, GrpcServerConfig, build_grpc_server
from cluster.prompts.policy import Share
from cluster.proto.watchword.v1 import generation_pb2 as pb
from cluster.proto.watchword.v1 import generation_pb2_grpc
from cluster.serving.core import ServedModel, ServingCore
from cluster.serving.token_table import TokenTable

EOS = 256
MODEL = ModelInfo(name="bytes", max_model_len=512, vocab_size=257, eos_token_ids=frozenset({EOS}))


class BytePrompts:
    """Each UTF-8 byte is a token. Keeps what it was asked for."""

    def __init__(self) -> None:
        self.prompt_refs: list[PromptRef | None] = []
        self.special_tokens: list[bool] = []
        self.shares: list[Share | None] = []

    def chat(
        self,
        identity: CallerIdentity,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt_ref: PromptRef | None = None,
        share: Share | None = None,
    ) -> BuiltPrompt:
        self.prompt_refs.append(prompt_ref)
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return self.text(identity, text, share=share)

    def text(
        self, identity: CallerIdentity, text: str, *, add_special_tokens: bool = True, share: Share | None = None
    ) -> BuiltPrompt:
        self.special_tokens.append(add_special_tokens)
        return self.tokens(identity, tuple(text.encode()), share=share)

    def tokens(self, identity: CallerIdentity, token_ids: Sequence[int], *, share: Share | None = None) -> BuiltPrompt:
        self.shares.append(share)
        return BuiltPrompt(tuple(token_ids), (ScopeSpan(None, identity.private),))


@dataclass
class ScriptedBackend:
    """Says `answer`, one byte a step, then fails with `error` or ends; repeats it for ever when `is_endless`."""

    answer: str = "watch"
    is_endless: bool = False
    error: Exception | None = None
    step_s: float = 0.0
    hold: asyncio.Event | None = None  # waited for after the first step
    tokens_per_step: int = 1  # the byte of a step, this many times
    ready: bool = True
    requests: list[Request] = field(default_factory=list)
    num_open: int = 0
    num_steps: int = 0

    async def generate(
        self, request: Request, *, affinity_key: str | None = None, placement: Placement | None = None
    ) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        self.num_open += 1
        if placement is not None:
            placement.worker_id = "worker-7"
        try:
            while True:
                for position, token_id in enumerate(self.answer.encode()):
                    yield self._output(request, token_id, position)
                    self.num_steps += 1
                    await asyncio.sleep(self.step_s)
                    if self.hold is not None:
                        await self.hold.wait()
                if not self.is_endless:
                    break
            if self.error is not None:
                raise self.error
            yield self._end(request)
        finally:
            self.num_open -= 1

    async def is_ready(self) -> bool:
        return self.ready

    def _output(self, request: Request, token_id: int, position: int) -> RequestOutput:
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = (TokenLogprob(token_id, -0.5, ((token_id, -0.5), (EOS, -1.5))),)
        deltas = tuple(
            ChoiceDelta(index, (token_id,) * self.tokens_per_step, logprobs) for index in range(request.sampling.n)
        )
        return RequestOutput(request.request_id, deltas, num_cached_tokens=16 if position == 0 else None)

    def _end(self, request: Request) -> RequestOutput:
        deltas = tuple(ChoiceDelta(index, (), finish_reason=FinishReason.STOP) for index in range(request.sampling.n))
        return RequestOutput(request.request_id, deltas, finished=True)


@dataclass
class Rig:
    backend: ScriptedBackend
    prompts: BytePrompts
    core: ServingCore
    authenticator: Authenticator
    server: GrpcServer
    channel: grpc.aio.Channel
    stub: generation_pb2_grpc.GenerationServiceStub

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


@asynccontextmanager
async def front_door(
    backend: ScriptedBackend | None = None,
    *,
    config: GrpcServerConfig | None = None,
    keys_path: Path | None = None,
    identity_headers: IdentityHeaders | None = None,
    readiness_period_s: float = 0.05,
) -> AsyncIterator[Rig]:
    """A running server on a free port of loopback, and a channel to it."""
    backend = backend or ScriptedBackend()
    prompts = BytePrompts()
    keyer = BlockKeyer(bytes(32), ModelIdentity("bytes", b"weights", "float32", "test", 16))
    table = TokenTable([bytes([byte]) for byte in range(256)], [EOS])
    core = ServingCore([ServedModel(MODEL, prompts, table, keyer)], backend)
    config = replace(config or GrpcServerConfig(), port=0, readiness_period_s=readiness_period_s)
    authenticator = Authenticator(keys_path, allow_anonymous=keys_path is None)
    server = build_grpc_server(core, authenticator, config, identity_headers)
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=[("grpc.use_local_subchannel_pool", 1)])
    try:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        yield Rig(backend, prompts, core, authenticator, server, channel, stub)
    finally:
        await channel.close()
        await server.stop(0)


def ask(text: str = "hello", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(model="bytes", prompt=pb.Prompt(text=text), sampling=pb.SamplingParams(**sampling))


async def collect(call: Any) -> tuple[str, list[pb.GenerateResponse]]:
    """The text of choice 0 and every response."""
    responses = [response async for response in call]
    text = "".join(delta.text for response in responses for delta in response.deltas if delta.index == 0)
    return text, responses


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call must end with."""
    try:
        if hasattr(call, "__aiter__"):
            await collect(call)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is a plain fact of the backend, nobody signals it
            await asyncio.sleep(0.01)


class ForeignError(RuntimeError):
    """Stands for an exception of a library that quotes what it was given."""


def watchword_errors() -> list[type[WatchwordError]]:
    def below(kind: type[WatchwordError]) -> list[type[WatchwordError]]:
        return [kind, *(deeper for child in kind.__subclasses__() for deeper in below(child))]

    # Those of the contract: HTTP's own refusals (a path, a method) never reach gRPC.
    return [kind for kind in below(WatchwordError) if kind.__module__ == WatchwordError.__module__]
