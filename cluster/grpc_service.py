"""GenerationService over the serving core: who asks, what for, and how an error is told. Binds nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from cluster.api.errors import AuthenticationError, InvalidRequestError, WatchwordError
from cluster.api.ids import RequestId, new_request_id
from cluster.api.principal import Principal
from cluster.auth.authenticator import Authenticator
from cluster.auth.proxy import IdentityHeaders
from cluster.errors_table import row_of
from cluster.grpc_wire import read_caller, read_generate, read_prompt, write_delta, write_model, write_usage
from cluster.proto.watchword.v1 import generation_pb2 as pb
from cluster.serving.core import ServingCore
from cluster.serving.generation import Generation

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

REQUEST_ID_METADATA = "x-request-id"
WORKER_METADATA = "x-watchword-worker"
ERROR_CODE_METADATA = "watchword-error-code"
ERROR_PARAM_METADATA = "watchword-error-param"
# Understood by gRPC clients that have a retry policy; milliseconds.
RETRY_PUSHBACK_METADATA = "grpc-retry-pushback-ms"

logger = logging.getLogger(__name__)

RequestMessage = TypeVar("RequestMessage")


class GenerationService:
    """The three calls. Every one answers with a status of our own: no exception reaches the gRPC library."""

    def __init__(
        self,
        core: ServingCore,
        authenticator: Authenticator,
        identity_headers: IdentityHeaders,
        *,
        request_timeout_s: float,
        debug_metadata: bool = False,
    ) -> None:
        self._core = core
        self._authenticator = authenticator
        self._identity_headers = identity_headers
        self._request_timeout_s = request_timeout_s
        self._debug_metadata = debug_metadata

    def handler(self) -> grpc.GenericRpcHandler:
        """As the generated `add_..._to_server`, with requests that cannot be parsed left to us to answer."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.generate, _parser(pb.GenerateRequest), pb.GenerateResponse.SerializeToString
                ),
                "Tokenize": grpc.unary_unary_rpc_method_handler(
                    self.tokenize, _parser(pb.TokenizeRequest), pb.TokenizeResponse.SerializeToString
                ),
                "GetModel": grpc.unary_unary_rpc_method_handler(
                    self.get_model, _parser(pb.GetModelRequest), pb.GetModelResponse.SerializeToString
                ),
            },
        )

    async def generate(self, request: pb.GenerateRequest | None, context: grpc.aio.ServicerContext) -> None:
        # Written as a coroutine with `context.write`, not as an async generator: when the client goes away, the
        # cancellation then always lands in this frame, whose `finally` stops the engine.
        async with _answering(context) as request_id:
            principal = self._authenticate(context)
            given = read_generate(_parsed(request), self._header_user(context))
            generation = await self._core.start(principal, given, request_id, self._deadline_unix_s(context))
            try:
                await self._stream(generation, context)
            finally:
                await generation.aclose()
                self._tell_worker(generation, principal, context)

    async def tokenize(
        self, request: pb.TokenizeRequest | None, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        async with _answering(context):
            principal = self._authenticate(context)
            asked = _parsed(request)
            caller = read_caller(asked, self._header_user(context))
            prompt = await self._core.tokenize(principal, asked.model, read_prompt(asked.prompt), caller)
            model, _ = self._core.find_model(asked.model)
            return pb.TokenizeResponse(token_ids=prompt.token_ids, max_model_len=model.info.max_model_len)

    async def get_model(
        self, request: pb.GetModelRequest | None, context: grpc.aio.ServicerContext
    ) -> pb.GetModelResponse:
        async with _answering(context):
            self._authenticate(context)
            model, _ = self._core.find_model(_parsed(request).model)
            return write_model(replace(model.info, adapters=tuple(model.adapter_digests)))

    async def _stream(self, generation: Generation, context: grpc.aio.ServicerContext) -> None:
        is_first = True
        async for delta in generation:
            message = pb.GenerateResponse(deltas=[write_delta(delta)])
            if is_first:
                message.seed = generation.seed
                is_first = False
            await context.write(message)
        await context.write(pb.GenerateResponse(usage=write_usage(generation.usage)))

    def _authenticate(self, context: grpc.aio.ServicerContext) -> Principal:
        values = [value for name, value in context.invocation_metadata() if name == "authorization"]
        if len(values) > 1:
            raise AuthenticationError("the metadata authorization was sent more than once")
        return self._authenticator.authenticate(values[0] if values else None)

    def _header_user(self, context: grpc.aio.ServicerContext) -> str | None:
        """Metadata plays the part of HTTP headers; only a configured proxy's counts."""
        headers = ((name, value) for name, value in context.invocation_metadata() if isinstance(value, str))
        return self._identity_headers.user_of(_peer_address(context.peer()), headers)

    def _deadline_unix_s(self, context: grpc.aio.ServicerContext) -> float:
        remaining_s = context.time_remaining()
        longest_s = self._request_timeout_s
        return time.time() + (longest_s if remaining_s is None else min(remaining_s, longest_s))

    def _tell_worker(self, generation: Generation, principal: Principal, context: grpc.aio.ServicerContext) -> None:
        worker_id = generation.placement.worker_id
        if worker_id is not None and (principal.is_operator or self._debug_metadata):
            context.set_trailing_metadata(((WORKER_METADATA, worker_id),))


def _parser(kind: type[RequestMessage]) -> Callable[[bytes], RequestMessage | None]:
    def parse(data: bytes) -> RequestMessage | None:
        try:
            return kind.FromString(data)  # type: ignore[attr-defined]
        except DecodeError:
            return None

    return parse


def _parsed(request: Any) -> Any:
    if request is None:
        raise InvalidRequestError("the request is not a valid message: it does not parse, or a string is not UTF-8")
    return request


def _peer_address(peer: str) -> str | None:
    """ "ipv4:127.0.0.1:5000" -> "127.0.0.1", "ipv6:%5B::1%5D:5000" -> "::1"; None for other transports."""
    scheme, _, rest = unquote(peer).partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return None
    return rest.rpartition(":")[0].strip("[]")


@asynccontextmanager
async def _answering(context: grpc.aio.ServicerContext) -> AsyncIterator[RequestId]:
    """Names the request, and turns whatever happens in it into a status. Cancellation passes through."""
    request_id = new_request_id()
    try:
        await context.send_initial_metadata(((REQUEST_ID_METADATA, request_id),))
        yield request_id
    except WatchwordError as error:
        await _abort(context, error)
    except grpc.aio.BaseError:
        raise  # the call is over already: aborted by us, or gone
    except Exception as error:
        # The text of a foreign exception may quote a prompt, so neither the caller nor the log sees it.
        logger.error("request %s failed: %s at %s", request_id, type(error).__name__, _where(error))
        details = f"internal error; quote {request_id} when you report it"
        await context.abort(grpc.StatusCode.INTERNAL, details, ((ERROR_CODE_METADATA, "internal_error"),))


async def _abort(context: grpc.aio.ServicerContext, error: WatchwordError) -> None:
    metadata = [*context.trailing_metadata(), (ERROR_CODE_METADATA, error.code)]
    if error.param is not None:
        metadata.append((ERROR_PARAM_METADATA, error.param))
    if error.retry_after_s is not None:
        metadata.append((RETRY_PUSHBACK_METADATA, str(max(0, round(error.retry_after_s * 1000)))))
    status = grpc.StatusCode[row_of(error).grpc_status]
    await context.abort(status, error.message, tuple(metadata))


def _where(error: BaseException) -> str:
    """The frames from the outside in, as file:line."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}")
        traceback = traceback.tb_next
    return " > ".join(frames[-8:])
