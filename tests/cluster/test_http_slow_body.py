"""How long a caller may take over a request's body, through a real socket."""

from __future__ import annotations

import asyncio
import json

import pytest
from front_door import FakeBackend, build_app, chat_body
from http_socket import connection, send_all

BODY = json.dumps(chat_body(max_tokens=4)).encode()
HEAD = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


async def drip(writer: asyncio.StreamWriter, data: bytes, pause_s: float) -> None:
    for byte in data:
        await send_all(writer, bytes([byte]))
        await asyncio.sleep(pause_s)


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/responses", b"/tokenize"])
async def test_a_body_that_comes_byte_by_byte_is_cut_off(path: bytes) -> None:
    backend = FakeBackend()
    async with connection(build_app(backend, body_timeout_s=0.2)) as (reader, writer):
        await send_all(writer, HEAD % (path, len(BODY)))
        dripping = asyncio.create_task(drip(writer, BODY, 0.02))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout=60)
        assert head.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in head.lower()
        try:
            error = json.loads(await asyncio.wait_for(reader.read(), timeout=60))["error"]  # and then the end
            assert error["code"] == "body_too_slow"
            assert "0.2 s" in error["message"]
        except ConnectionError:
            pass  # bytes that came after the end reset the connection
        finally:
            dripping.cancel()
    assert backend.requests == []


async def test_a_body_in_pieces_has_the_time_that_it_may_take() -> None:
    backend = FakeBackend()
    async with connection(build_app(backend, body_timeout_s=300.0)) as (reader, writer):
        await send_all(writer, HEAD % (b"/v1/chat/completions", len(BODY)))
        await drip(writer, BODY, 0.001)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert len(backend.requests) == 1
