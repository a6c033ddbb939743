"""Server-sent events: framed events in, an HTTP answer out; an error becomes an event, and the stream has an end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.errors import RequestAbortedError
from cluster.http.error_reply import error_body, hide
from cluster.http.until_disconnect import run_until_disconnect
from cluster.openai.reply_parts import error_event

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Waits for the first event before it answers, so that an early error still has its HTTP status.

    `late_headers` is asked once that event is there: by then it is known which worker answers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        *,
        late_headers: Callable[[], Mapping[str, str]],
        frame_error: Callable[[dict[str, Any]], str] = error_event,
        tail: bytes = DONE,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._late_headers = late_headers
        self._frame_error = frame_error
        self._tail = tail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, None)
            for name, value in self._late_headers().items():
                self.headers[name] = value
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                if first is not None:
                    await send(_body(first))
                async for event in events:
                    await send(_body(event))
            except RequestAbortedError:
                raise
            except Exception as error:
                await send(_body(self._frame_error(error_body(hide(error))["error"])))
                await send({"type": "http.response.body", "body": self._tail, "more_body": False})
                raise  # the front logs what is a bug; the answer is complete
            await send({"type": "http.response.body", "body": self._tail, "more_body": False})


def _body(event: str) -> dict[str, object]:
    return {"type": "http.response.body", "body": event.encode(), "more_body": True}
