"""Operators only: GET /v1/requests/{id}/trace, and GET /v1/evidence, which `watchword check` reads."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.api.errors import PermissionDeniedError
from cluster.api.ids import RequestId
from cluster.inspection import Inspector
from cluster.openai.json_text import to_json_bytes


class InspectionRoutes:
    def __init__(self, inspector: Inspector) -> None:
        self._inspector = inspector

    def routes(self) -> list[Route]:
        return [
            Route("/v1/requests/{id}/trace", self.trace, methods=["GET"]),
            Route("/v1/evidence", self.evidence, methods=["GET"]),
        ]

    async def trace(self, request: Request) -> Response:
        """Takes the id of an answer ("chatcmpl-…") as well as that of the x-watchword-request-id header."""
        _require_operator(request)
        request_id = RequestId(request.path_params["id"].rpartition("-")[2])
        return _json(await self._inspector.trace(request_id))

    async def evidence(self, request: Request) -> Response:
        _require_operator(request)
        return _json(await self._inspector.evidence())


def _require_operator(request: Request) -> None:
    if not request.state.principal.is_operator:
        raise PermissionDeniedError("looking into workers needs an operator's key")


def _json(body: object) -> Response:
    return Response(to_json_bytes(body), media_type="application/json")
