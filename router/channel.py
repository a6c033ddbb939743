"""The router's end of the gateways' questions: one gRPC stream per gateway.

Not calls to the actor: those cost several times what a placement does (docs/resilience.md). A stream that ends, for
whatever reason, withdraws what it has asked and not been told.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from cluster.api.errors import InternalError, WatchwordError
from cluster.api.ids import RequestId, WorkerId
from cluster.api.router_channel import (
    METHOD_OPEN,
    SERVICE,
    Answer,
    Answers,
    Ask,
    Command,
    FirstToken,
    Note,
    Notes,
    Release,
    Withdraw,
    WorkerFailed,
)
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.stream import SERVER_OPTIONS, Outbox, is_epoch, is_token
from router.circuit import FailureKind

logger = logging.getLogger(__name__)


class ServedRouter(Protocol):
    """What the channel needs of a router. Cancelling `route` leaves no place behind."""

    async def route(self, query: RouteQuery) -> RouteDecision: ...
    def first_token(self, request_id: RequestId, worker_id: WorkerId | None = None) -> None: ...
    def release(self, request_id: RequestId, worker_id: WorkerId | None = None) -> None: ...
    def worker_failed(self, worker_id: WorkerId, epoch: str, kind: FailureKind | str) -> None: ...


class _Stream(Outbox[Answer]):
    """One gateway's stream, with its questions that wait for an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[RequestId, asyncio.Task[None]] = {}


class RouterChannel:
    """Serves `router` to gateways that show `token`. For the event loop that the router lives on."""

    def __init__(self, router: ServedRouter, token: str, epoch: str, host: str) -> None:
        self._router = router
        self._token = token
        self._epoch = epoch
        self._host = host
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Listens on a free port of `host`; returns the address."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(
            self._open, request_deserializer=bytes, response_serializer=pickle.dumps
        )
        handlers = {METHOD_OPEN.rsplit("/", 1)[1]: handler}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = self._server.add_insecure_port(f"{self._host}:0")
        await self._server.start()
        return f"{self._host}:{port}"

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _open(self, commands: AsyncIterator[bytes], context: Any) -> AsyncIterator[Answers]:
        metadata = context.invocation_metadata()
        # Before the first message is read: commands are pickles, and only a holder of the token may send one.
        if not is_token(metadata, self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "channel token refused")
        if not is_epoch(metadata, self._epoch):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this router has restarted")
        stream = _Stream()
        stream.push()  # an empty message at once: so the gateway knows that it is let in
        reader = asyncio.create_task(self._read(commands, stream))
        reader.add_done_callback(lambda _: stream.close())  # a stream that hears nothing more has no use
        try:
            while not stream.is_closed:
                yield Answers(await stream.next())
        finally:
            reader.cancel()
            for request_id in list(stream.asked):
                self._withdraw(request_id, stream)
            for answer in stream.pending:
                self._router.release(answer.request_id)

    async def _read(self, commands: AsyncIterator[bytes], stream: _Stream) -> None:
        async for message in commands:
            command: Command = pickle.loads(message)
            match command:
                case Ask(query):
                    assert query.request_id not in stream.asked, "withdrawn before it is asked again"
                    stream.asked[query.request_id] = asyncio.create_task(self._answer(query, stream))
                case Withdraw(request_id):
                    self._withdraw(request_id, stream)
                case Notes(notes):
                    for note in notes:
                        self._take(note)

    async def _answer(self, query: RouteQuery, stream: _Stream) -> None:
        request_id = query.request_id
        try:
            answer = Answer(request_id, decision=await self._router.route(query))
        except WatchwordError as error:
            answer = Answer(request_id, error=error)
        except Exception:
            logger.exception("a placement failed in an unforeseen way")
            answer = Answer(request_id, error=InternalError("the router failed"))
        # Together, so that a withdrawal finds either the question or the place.
        del stream.asked[request_id]
        stream.push(answer)

    def _withdraw(self, request_id: RequestId, stream: _Stream) -> None:
        task = stream.asked.pop(request_id, None)
        if task is None:
            self._router.release(request_id)
        else:
            task.cancel()

    def _take(self, note: Note) -> None:
        match note:
            case FirstToken(request_id, worker_id):
                self._router.first_token(request_id, worker_id)
            case Release(request_id, worker_id):
                self._router.release(request_id, worker_id)
            case WorkerFailed(worker_id, epoch):
                self._router.worker_failed(worker_id, epoch, FailureKind.CONNECT)
