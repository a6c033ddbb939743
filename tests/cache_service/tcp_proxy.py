"""A TCP proxy that delays or holds what passes, cuts connections, or speaks TLS to its clients."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress


class TcpProxy:
    """Forwards to 127.0.0.1:`target_port`. `delay_s` may be changed at any time; so may `is_cut`, for new bytes.

    Nothing passes while `passing` is cleared.
    """

    def __init__(self, target_port: int, delay_s: float = 0.0, tls: ssl.SSLContext | None = None) -> None:
        self.delay_s = delay_s
        self.is_cut = False
        self.passing = asyncio.Event()
        self.passing.set()
        self.num_connections = 0
        self._target_port = target_port
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except ConnectionError:
            writer.close()
            return
        for source, sink in ((reader, upstream_writer), (upstream_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, ssl.SSLError):
            while (piece := await source.read(65536)) and not self.is_cut:
                await asyncio.sleep(self.delay_s / 2)
                await self.passing.wait()
                sink.write(piece)
                await sink.drain()
        sink.close()
