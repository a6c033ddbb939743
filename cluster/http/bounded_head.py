"""uvicorn's HTTP protocol with an end to what a caller may send before it has shown a key: its request's head.

uvicorn bounds neither the size of a head nor the time it takes, so that anyone who reaches the port could fill the
gateway's memory or its table of open files.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class BoundedHeadProtocol(HttpToolsProtocol):
    """A head that is too long is answered with 431, one that is too slow is not answered; both close the connection.

    `max_head_bytes` is kept to within two reads of the socket. Time counts from the connection's or the head's first
    byte, whichever comes first, to the head's last; the time for a body is kept where bodies are read (json_body.py).
    """

    max_head_bytes = 65_536
    head_timeout_s = 30.0

    _num_heads = 0
    _is_in_head = False
    _num_head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        head = self._num_heads if self._is_in_head else None
        if self.cycle is None or self.cycle.response_complete:
            self._arm()  # here and not when a message begins: empty lines before one begin nothing
        super().data_received(data)
        if not self._is_in_head or head != self._num_heads:
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > self.max_head_bytes and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        self._num_heads += 1
        self._num_head_bytes = 0
        self._is_in_head = True
        self._arm()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._disarm()
        super().on_headers_complete()

    def _refuse(self) -> None:
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
        self.transport.close()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
