"""What a caller without a key can hold of the gateway: a head has a size and a time, through a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from http_socket import connection, send_all

from cluster.http.bounded_head import BoundedHeadProtocol

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
MAX_BYTES = 65_536
READ_BYTES = 262_144  # of one read of the socket


class QuickProtocol(BoundedHeadProtocol):
    head_timeout_s = 0.3


async def answer(scope: dict[str, object], receive: Callable[[], Awaitable[dict[str, object]]], send: object) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))  # type: ignore[arg-type]
        more = bool(message.get("more_body"))
    body = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": body})  # type: ignore[operator]


async def test_a_head_without_end_is_refused_and_a_long_body_is_not() -> None:
    async with connection(answer) as (reader, writer):
        body = b"x" * (4 * READ_BYTES)
        await send_all(writer, GET + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert int(await reader.readexactly(len(str(len(body))))) == len(body)
        answered = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        await asyncio.sleep(0)  # it reads before the server's end of the connection can break the sending
        await send_all(writer, GET + b"x-long: " + b"a" * (MAX_BYTES + 3 * READ_BYTES))
        assert (await answered).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("sent", [b"", GET, b"\r\n"])
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    async with connection(answer, QuickProtocol, sent=sent) as (reader, _):
        assert await asyncio.wait_for(reader.read(), timeout=60) == b""


async def test_empty_lines_do_not_hold_a_connection_that_was_answered() -> None:
    async with connection(answer, QuickProtocol, sent=GET + b"\r\n") as (reader, writer):
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")

        async def drip() -> None:
            while True:
                await send_all(writer, b"\r\n")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        try:
            assert await asyncio.wait_for(reader.read(), timeout=60) == b""
        except ConnectionError:
            pass
        finally:
            dripping.cancel()


async def test_a_slow_body_has_the_time_that_it_needs() -> None:
    async with connection(answer, QuickProtocol, sent=GET + b"content-length: 3\r\n\r\n") as (reader, writer):
        for _ in range(3):
            await asyncio.sleep(0.2)
            await send_all(writer, b"x")
        assert (await reader.readuntil(b"\r\n\r\n3")).startswith(b"HTTP/1.1 200")
