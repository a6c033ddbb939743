"""The gateway's end of a worker's token stream: submits, aborts, and hands each request its own outputs.

The only key for handing out is the request id that this gateway made itself; ids are never reused (cluster/api/ids.py),
so a late message of a finished request finds nobody.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncGenerator

import grpc

from cluster.api.channel import EPOCH_METADATA, METHOD_OPEN, TOKEN_METADATA, Abort, Command, Outputs, Submit
from cluster.api.errors import DeadlineExceededError, WorkerLostError
from cluster.api.ids import RequestId
from cluster.api.output import RequestOutput
from cluster.api.request import Request

CONNECT_TIMEOUT_S = 5.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A worker that a network cut hides answers no ping: its streams end after 10 s at the latest.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
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
        self._queues: dict[RequestId, asyncio.Queue[RequestOutput | None]] = {}
        self._write_lock = asyncio.Lock()
        self._is_lost = False
        self._reader = asyncio.create_task(self._read())

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    @property
    def num_requests(self) -> int:
        return len(self._queues)

    async def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request until it is finished. Closing the iterator early aborts it on the worker."""
        request_id = request.request_id
        assert request_id not in self._queues
        queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._queues[request_id] = queue
        finished = False
        try:
            await self._send(Submit(request))
            while not finished:
                try:
                    # Around the wait alone: a timeout that spanned a yield would strike the caller instead.
                    async with asyncio.timeout(_remaining_s(request)):
                        output = await queue.get()
                except TimeoutError:
                    raise DeadlineExceededError("the request did not finish before its deadline") from None
                if output is None:
                    raise WorkerLostError("the worker was lost")
                finished = output.finished
                yield output
        finally:
            self._queues.pop(request_id, None)
            if not finished and not self._is_lost:
                # Detached: this block also runs while the caller is being cancelled, and the abort must still leave.
                task = asyncio.create_task(self._send_abort(request_id))
                _background.add(task)
                task.add_done_callback(_background.discard)

    async def close(self) -> None:
        self._reader.cancel()
        self._lose()
        await self._channel.close()

    async def _send_abort(self, request_id: RequestId) -> None:
        try:
            await self._send(Abort((request_id,)))
        except WorkerLostError:
            return  # a lost worker has aborted everything

    async def _send(self, command: Command) -> None:
        try:
            async with self._write_lock:
                if self._is_lost:
                    raise WorkerLostError("the worker was lost")
                await asyncio.wait_for(self._call.write(pickle.dumps(command)), CONNECT_TIMEOUT_S)
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
            self._lose()
            raise WorkerLostError("the worker could not be reached") from None

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._deliver(message)
        except grpc.aio.AioRpcError:
            pass  # the reason does not matter: the stream is gone
        finally:
            self._lose()

    def _deliver(self, message: Outputs) -> None:
        for output in message.outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)

    def _lose(self) -> None:
        self._is_lost = True
        for queue in self._queues.values():
            queue.put_nowait(None)


def _remaining_s(request: Request) -> float | None:
    return None if request.deadline_unix_s is None else max(0.0, request.deadline_unix_s - time.time())


_background: set[asyncio.Task[None]] = set()
