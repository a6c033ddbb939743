"""Runs the whole checklist against one server."""

from __future__ import annotations

from cluster.api.errors import InvalidRequestError
from cluster.checks.inside import inside_lines
from cluster.checks.line import CheckLine
from cluster.checks.live_server import LiveServer
from cluster.checks.outside import authentication, key_completeness, monitoring


async def run_checklist(url: str, api_key: str | None) -> list[CheckLine]:
    """Raises UnavailableError when nobody answers, InvalidRequestError without an operator's key."""
    async with LiveServer(url, api_key) as server:
        reply = await server.get("/v1/evidence")
        if reply.status != 200 or not isinstance(reply.body, dict):
            raise InvalidRequestError(f"{server.url}/v1/evidence answered {reply.status}: an operator's key is needed")
        evidence = reply.body
        keys = await key_completeness(server, evidence)
        outside = [await authentication(server, evidence), await monitoring(server, evidence)]
        return [*outside, keys, *inside_lines(evidence)]
