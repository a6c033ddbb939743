"""Runs work for a client only while the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from cluster.api.errors import RequestAbortedError

Result = TypeVar("Result")


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. When the client goes first, `work` is cancelled at once and RequestAbortedError raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestAbortedError("the client went away")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        # Waited for: only then have blocks and reservations been given back.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
