"""The worker's end of the token streams: one gRPC stream per gateway, all its requests multiplexed on it.

Knows which request belongs to which stream and nothing of engines' insides. A stream that ends, for whatever reason,
aborts what it had submitted, so a lost gateway leaves no request behind.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc

from cluster.api.channel import (
    METHOD_CONTROL,
    METHOD_OPEN,
    SERVICE,
    Abort,
    Command,
    ControlCall,
    Outputs,
    Submit,
)
from cluster.api.errors import InternalError, UnavailableError, WatchwordError
from cluster.api.ids import RequestId
from cluster.api.output import RequestOutput
from cluster.api.request import Request
from cluster.api.stream import SERVER_OPTIONS, Outbox, is_epoch, is_token

logger = logging.getLogger(__name__)


class ServedEngine(Protocol):
    """What the channel needs of an engine; both calls are thread-safe and return at once."""

    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: RequestId) -> None: ...


Control = Callable[[ControlCall], Awaitable[object]]


class _Stream(Outbox[RequestOutput]):
    """One gateway's stream, with the requests that came by it."""

    def __init__(self) -> None:
        super().__init__()
        self.request_ids: set[RequestId] = set()


class WorkerChannel:
    """Serves `engine` to gateways that show `token`. All state is touched on the event loop only."""

    def __init__(self, engine: ServedEngine, control: Control, token: str, epoch: str, host: str) -> None:
        self._engine = engine
        self._control = control
        self._token = token
        self._epoch = epoch
        self._host = host
        self._streams: dict[RequestId, _Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Listens on a free port of `host`; returns the address."""
        self._loop = asyncio.get_running_loop()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(
            self._open, request_deserializer=bytes, response_serializer=pickle.dumps
        )
        control = grpc.unary_unary_rpc_method_handler(self._control_call, request_deserializer=bytes)
        handlers = {METHOD_OPEN.rsplit("/", 1)[1]: handler, METHOD_CONTROL.rsplit("/", 1)[1]: control}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = self._server.add_insecure_port(f"{self._host}:0")
        await self._server.start()
        return f"{self._host}:{port}"

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    def on_outputs(self, outputs: list[RequestOutput]) -> None:
        """Called by the engine's step thread, once a step."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # its gateway left
            stream.push(output)
            if output.finished:
                del self._streams[output.request_id]
                stream.request_ids.discard(output.request_id)

    async def _open(self, commands: AsyncIterator[bytes], context: Any) -> AsyncIterator[Outputs]:
        await self._authenticate(context)
        stream = _Stream()
        reader = asyncio.create_task(self._read(commands, stream))
        reader.add_done_callback(lambda _: stream.close())  # a stream that hears nothing more has no use
        try:
            while not stream.is_closed:
                yield Outputs(await stream.next())
        finally:
            reader.cancel()
            for request_id in list(stream.request_ids):
                self._streams.pop(request_id, None)
                self._engine.abort(request_id)

    async def _control_call(self, message: bytes, context: Any) -> bytes:
        await self._authenticate(context)
        # Not by a serializer of the handler's: gRPC turns an answer that is text into bytes before it asks one.
        return pickle.dumps(await self._control(pickle.loads(message)))

    async def _authenticate(self, context: Any) -> None:
        # Before the first message is read: commands are pickles, and only a holder of the token may send one.
        metadata = context.invocation_metadata()
        if not is_token(metadata, self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "channel token refused")
        if not is_epoch(metadata, self._epoch):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker has restarted")

    async def _read(self, commands: AsyncIterator[bytes], stream: _Stream) -> None:
        async for message in commands:
            command: Command = pickle.loads(message)
            match command:
                case Submit(request):
                    self._submit(request, stream)
                case Abort(request_ids):
                    for request_id in request_ids:
                        if request_id in stream.request_ids:
                            stream.request_ids.discard(request_id)
                            self._streams.pop(request_id, None)
                            self._engine.abort(request_id)

    def _submit(self, request: Request, stream: _Stream) -> None:
        request_id = request.request_id
        if request_id in self._streams:
            stream.push(RequestOutput(request_id, finished=True, error=InternalError("request id is in use")))
            return
        self._streams[request_id] = stream
        stream.request_ids.add(request_id)
        try:
            self._engine.submit(request)
        except InternalError:
            # The engine is dead, and not because of this request: it may be served elsewhere.
            self._refuse(request_id, UnavailableError("the worker's engine has failed"))
        except WatchwordError as error:
            self._refuse(request_id, error)
        except Exception:
            logger.exception("engine refused a request in an unforeseen way")
            self._refuse(request_id, InternalError("the worker failed"))

    def _refuse(self, request_id: RequestId, error: WatchwordError) -> None:
        self._deliver([RequestOutput(request_id, finished=True, error=error)])
