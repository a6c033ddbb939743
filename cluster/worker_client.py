"""The gateway's end of a worker's token stream: submits, aborts, and hands each request its own outputs.

The only key for handing out is the request id that this gateway made itself; ids are never reused (cluster/api/ids.py),
so a late message of a finished request finds nobody.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import AsyncGenerator, Callable

import grpc

from cluster.api.channel import EPOCH_METADATA, METHOD_OPEN, TOKEN_METADATA, Abort, Command, Outputs, Submit
from cluster.api.errors import DeadlineExceededError, WorkerLostError
from cluster.api.ids import RequestId
from cluster.api.output import RequestOutput
from cluster.api.request import Request
from cluster.mailbox import Mailbox

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 10.0  # the first write waits for the connection
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A worker that a network cut hides answers no ping: its streams end after 10 s at the latest.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the one that counts in current gRPC; its default is a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # a gateway that only listens may go on asking
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class WorkerClient:
    """A connection to one life (epoch) of a worker. When it breaks, every request on it gets WorkerLostError."""

    def __init__(self, address: str, token: str, epoch: str) -> None:
        self.address = address
        self.epoch = epoch
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        open_stream = self._channel.stream_stream(
            METHOD_OPEN, request_serializer=bytes, response_deserializer=pickle.loads
        )
        self._call = open_stream(metadata=((TOKEN_METADATA, token), (EPOCH_METADATA, epoch)))
        self._mailboxes: dict[RequestId, Mailbox] = {}
        self._on_finished: dict[RequestId, Callable[[], None]] = {}
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._is_lost = False
        # Written by a task of its own: cancelling a write, as a leaving client would, ends the whole stream.
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    @property
    def num_requests(self) -> int:
        return len(self._mailboxes)

    async def stream(
        self, request: Request, on_finished: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request until it is finished. Closing the iterator early aborts it on the worker.

        `on_finished` is called when the worker is done with it, which may be long before a slow caller has read all.
        """
        request_id = request.request_id
        assert request_id not in self._mailboxes
        mailbox = self._mailboxes[request_id] = Mailbox()
        self._on_finished[request_id] = on_finished
        if self._is_lost:
            mailbox.close()
        finished = False
        try:
            self._commands.put_nowait(Submit(request))
            while not finished:
                try:
                    # Around the wait alone: a timeout that spanned a yield would strike the caller instead.
                    async with asyncio.timeout(_remaining_s(request)):
                        output = await mailbox.take()
                except TimeoutError:
                    raise DeadlineExceededError("the request did not finish before its deadline") from None
                if output is None:
                    raise WorkerLostError("the worker was lost")
                finished = output.finished
                yield output
        finally:
            del self._mailboxes[request_id]
            self._on_finished.pop(request_id, None)
            if not mailbox.is_finished and not self._is_lost:
                self._commands.put_nowait(Abort((request_id,)))

    async def close(self) -> None:
        self._lose()
        if self._closing is not None:
            await self._closing

    async def _write(self) -> None:
        try:
            while True:
                message = pickle.dumps(await self._commands.get())
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await self._call.write(message)
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
            pass  # the reason does not matter: the stream is gone
        finally:
            self._lose()

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._deliver(message)
        except grpc.aio.AioRpcError as error:
            logger.info("the stream to %s ended: %s", self.address, error.code())
        finally:
            self._lose()

    def _deliver(self, message: Outputs) -> None:
        for output in message.outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            mailbox.put(output)
            if output.finished and (on_finished := self._on_finished.pop(output.request_id, None)) is not None:
                on_finished()

    def _lose(self) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        for mailbox in self._mailboxes.values():
            mailbox.close()
        self._closing = asyncio.create_task(self._take_down())

    async def _take_down(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._channel.close()


def _remaining_s(request: Request) -> float | None:
    return None if request.deadline_unix_s is None else max(0.0, request.deadline_unix_s - time.time())
