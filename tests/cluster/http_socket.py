"""An ASGI application behind a real socket, and one raw connection to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from cluster.http.bounded_head import BoundedHeadProtocol


@asynccontextmanager
async def connection(
    app: Any, protocol: type[BoundedHeadProtocol] = BoundedHeadProtocol, *, sent: bytes = b""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """`sent` is there before the server looks, so that none of its clocks runs meanwhile."""
    config = uvicorn.Config(app, http=protocol, ws="none", log_config=None, lifespan="off", timeout_keep_alive=600)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    client.sendall(sent)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def send_all(writer: asyncio.StreamWriter, data: bytes) -> None:
    try:
        writer.write(data)
        await writer.drain()
    except ConnectionError:
        pass
