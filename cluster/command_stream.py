"""A stream to one life of a worker or of the router: commands up, messages down, and the one moment when it is lost."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from cluster.api.stream import CLIENT_OPTIONS, pass_of

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 10.0  # the first write waits for the connection
Command = TypeVar("Command")


class CommandStream(Generic[Command]):
    """Opens at once; what cannot be opened is lost like what breaks later. For one event loop.

    `deliver` takes each message. `on_lost` is called once, whoever ends the stream.
    """

    def __init__(
        self,
        address: str,
        method: str,
        token: str,
        epoch: str,
        deliver: Callable[[Any], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.address = address
        self.epoch = epoch
        self.is_lost = False
        self._deliver = deliver
        self._on_lost = on_lost
        self._channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        open_stream = self._channel.stream_stream(method, request_serializer=bytes, response_deserializer=pickle.loads)
        self._call = open_stream(metadata=pass_of(token, epoch))
        self._commands: asyncio.Queue[Command | None] = asyncio.Queue()
        # Written by a task of its own: cancelling a write, as a leaving client would, ends the whole stream.
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        self._closing: asyncio.Task[None] | None = None

    def send(self, command: Command) -> None:
        """In order. On a lost stream it goes nowhere."""
        if not self.is_lost:
            self._commands.put_nowait(command)

    async def close(self, patience_s: float = 0.0) -> None:
        """Within `patience_s` the server takes what was sent; then, or when it has, the stream ends."""
        if patience_s and not self.is_lost:
            self._commands.put_nowait(None)
            await asyncio.wait(self._tasks, timeout=patience_s)
        self._lose()
        assert self._closing is not None
        await asyncio.wait([self._closing])  # whoever gives up waiting does not stop it

    async def _write(self) -> None:
        is_complete = False
        try:
            while (command := await self._commands.get()) is not None:
                message = pickle.dumps(command)
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await self._call.write(message)
            await self._call.done_writing()  # the server ends the stream when it has read all
            is_complete = True
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
            pass  # the reason does not matter: the stream is gone
        finally:
            if not is_complete:
                self._lose()

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._deliver(message)
        except grpc.aio.AioRpcError as error:
            logger.info("the stream to %s ended: %s", self.address, error.code())
        finally:
            self._lose()

    def _lose(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._on_lost()
        self._closing = asyncio.create_task(self._take_down())

    async def _take_down(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._channel.close()
