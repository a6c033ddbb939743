"""Runs the whole checklist against one server."""

from __future__ import annotations

from cluster.api.errors import InvalidRequestError
from cluster.checks.inside import inside_lines
from cluster.checks.line import CheckLine
from cluster.checks.live_server import LiveServer
from cluster.checks.outside import SETTLE_S, authentication, key_completeness, monitoring


async def run_checklist(url: str, api_key: str | None, settle_s: float = SETTLE_S) -> list[CheckLine]:
    """`settle_s`: until the router has heard which blocks a worker holds. Raises UnavailableError when nobody answers,
    InvalidRequestError without an operator's key."""
    async with LiveServer(url, api_key) as server:
        reply = await server.get("/v1/evidence")
        if reply.status != 200 or not isinstance(reply.body, dict):
            raise InvalidRequestError(f"{server.url}/v1/evidence answered {reply.status}: an operator's key is needed")
        evidence = reply.body
        keys = await key_completeness(server, evidence, settle_s)
        outside = [await authentication(server, evidence), await monitoring(server, evidence)]
        return [*outside, keys, *inside_lines(evidence)]
