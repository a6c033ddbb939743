"""The gateway's end of a worker's token stream: submits, aborts, and hands each request its own outputs.

The only key for handing out is the request id that this gateway made itself; ids are never reused (cluster/api/ids.py),
so a late message of a finished request finds nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from cluster.api.channel import METHOD_OPEN, Abort, Command, Outputs, Submit
from cluster.api.errors import DeadlineExceededError, WorkerLostError
from cluster.api.ids import RequestId
from cluster.api.output import RequestOutput
from cluster.api.request import Request
from cluster.command_stream import CommandStream
from cluster.mailbox import Mailbox


class WorkerClient:
    """A connection to one life (epoch) of a worker. When it breaks, every request on it gets WorkerLostError."""

    def __init__(self, address: str, token: str, epoch: str) -> None:
        self._mailboxes: dict[RequestId, Mailbox] = {}
        self._on_finished: dict[RequestId, Callable[[], None]] = {}
        self._stream: CommandStream[Command] = CommandStream(
            address, METHOD_OPEN, token, epoch, self._deliver, self._on_lost
        )

    @property
    def is_lost(self) -> bool:
        return self._stream.is_lost

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
        if self.is_lost:
            mailbox.close()
        finished = False
        try:
            self._stream.send(Submit(request))
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
            if not mailbox.is_finished:
                self._stream.send(Abort((request_id,)))

    async def close(self) -> None:
        await self._stream.close()

    def _deliver(self, message: Outputs) -> None:
        for output in message.outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            mailbox.put(output)
            if output.finished and (on_finished := self._on_finished.pop(output.request_id, None)) is not None:
                on_finished()

    def _on_lost(self) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.close()


def _remaining_s(request: Request) -> float | None:
    return None if request.deadline_unix_s is None else max(0.0, request.deadline_unix_s - time.time())
