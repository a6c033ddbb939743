"""`watchword trace`: which blocks a request read and wrote, and where each came from, by a server or a file."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.api.errors import InvalidRequestError, NotFoundError
from cluster.api.terminal import width_of
from cluster.checks.live_server import LiveServer, Reply
from cluster.commands.options import OperatorKey
from cluster.experiment.event_file import BlockEvent, EventFile, read_events
from cluster.experiment.trace import trace_request
from cluster.experiment.trace_text import print_trace


def trace(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="[EVENTS] REQUEST",
            help="id of an answer of the server; or a file of block events, as an experiment or a quarantined worker "
            "leaves it, and the request's name in it",
        ),
    ],
    url: Annotated[str, typer.Option(help="server")] = "http://127.0.0.1:8000",
    api_key: OperatorKey = None,
    history: Annotated[bool, typer.Option("--history", help="show everything that happened to each block")] = False,
) -> None:
    """Every block that a request read or wrote, where each came from, and where foreign state came in.

    Exit status: 0 none came in, 1 some did.
    """
    if len(what) > 2:
        raise InvalidRequestError(f"{len(what)} arguments, wanted REQUEST or EVENTS REQUEST")
    request = what[-1]
    if len(what) == 2:
        content = read_events(Path(what[0]))
    else:
        content, request = fetch_events(url, api_key, request)
    try:
        found = trace_request(content, request)
    except KeyError:
        raise NotFoundError(f"no event names request {request!r}", param="request") from None
    print_trace(Console(width=width_of(sys.stdout)), found, with_history=history)
    raise typer.Exit(0 if found.foreign is None else 1)


def fetch_events(url: str, api_key: str | None, request: str) -> tuple[EventFile, str]:
    """The events around a request, and the id under which they know it. Raises WatchwordError."""
    reply = asyncio.run(_get(url, api_key, f"/v1/requests/{request}/trace"))
    body: Any = reply.body or {}
    if reply.status != 200:
        raise InvalidRequestError(str(body.get("error", {}).get("message", f"the server answered {reply.status}")))
    return EventFile(body["users"], {}, [_event(item) for item in body["events"]]), body["request"]


async def _get(url: str, api_key: str | None, path: str) -> Reply:
    async with LiveServer(url, api_key) as server:
        return await server.get(path)


def _event(item: dict[str, Any]) -> BlockEvent:
    return BlockEvent(0, **{name: value for name, value in item.items() if name != "user"})
