"""The gateway's end of its stream to the router: questions, answers by request id, news."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cluster.api.ids import RequestId
from cluster.api.router_channel import METHOD_OPEN, Answer, Answers, Ask, Command, Note, Notes, RouterAddress, Withdraw
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.command_stream import CommandStream

LAST_WORDS_S = 1.0


class RouterLink:
    """A connection to one life (epoch) of the router. When it breaks, nobody waits for an answer any more."""

    def __init__(self, where: RouterAddress, token: str, on_lost: Callable[[], None] = lambda: None) -> None:
        self.epoch = where.epoch
        self._on_lost = on_lost
        self._waiting: dict[RequestId, asyncio.Future[Answer | None]] = {}
        self._is_open: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._stream: CommandStream[Command] = CommandStream(
            where.address, METHOD_OPEN, token, where.epoch, self._deliver, self._end
        )

    @property
    def is_lost(self) -> bool:
        return self._stream.is_lost

    async def opened(self) -> bool:
        """Waits until the router has let this gateway in. False: it is lost."""
        await asyncio.wait([self._is_open])
        return self._is_open.result() and not self.is_lost

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        """Raises what the router raises. None when it is lost or given up meanwhile.

        Whoever stops waiting without an answer, by being cancelled too, leaves no place behind in the router.
        """
        if self.is_lost:
            return None
        request_id = query.request_id
        future = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        answer = None
        self._stream.send(Ask(query))
        try:
            answer = await future
        finally:
            del self._waiting[request_id]
            if answer is None:
                self._stream.send(Withdraw(request_id))
        if answer is None:
            return None
        if answer.error is not None:
            raise answer.error
        return answer.decision

    def tell(self, notes: Sequence[Note]) -> None:
        self._stream.send(Notes(tuple(notes)))

    def give_up(self) -> None:
        """The router hangs: nobody waits for it any longer."""
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)

    async def close(self, patience_s: float = LAST_WORDS_S) -> None:
        """What has been told goes out first, if the router takes it in time. `on_lost` is not called for this."""
        self._on_lost = lambda: None
        await self._stream.close(patience_s)

    def _deliver(self, message: Answers) -> None:
        if not self._is_open.done():
            self._is_open.set_result(True)
        for answer in message.answers:
            future = self._waiting.get(answer.request_id)
            if future is not None and not future.done():
                future.set_result(answer)

    def _end(self) -> None:
        if not self._is_open.done():
            self._is_open.set_result(False)
        self.give_up()
        self._on_lost()
