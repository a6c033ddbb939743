"""What operates the service rather than uses it: health, readiness, metrics, version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cluster.api.errors import PermissionDeniedError, UnavailableError
from cluster.backend import Backend
from cluster.http.error_reply import error_response
from cluster.metrics import GatewayMetrics
from cluster.openai.json_text import to_json_bytes

WORKERS_HEADER = "x-watchword-workers"
QUARANTINED_HEADER = "x-watchword-quarantined"
CountWorkers = Callable[[], Awaitable[int]]


class OperationRoutes:
    """/ready tells how many workers take work and how many are quarantined, where the assembly can count them.

    While this gateway drains, /ready and /-/healthz say no although it still answers: balancers leave before it stops.
    """

    def __init__(
        self,
        backend: Backend,
        metrics: GatewayMetrics,
        version: str,
        count_workers: CountWorkers | None,
        count_quarantined: CountWorkers | None = None,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._version = version
        self._count_workers = count_workers
        self._count_quarantined = count_quarantined
        self._is_draining = is_draining

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/-/healthz", self.healthz, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def healthz(self, request: Request) -> Response:
        if self._is_draining():
            return PlainTextResponse("draining", status_code=503)
        return PlainTextResponse("success")  # the word that KubeRay's probes look for

    async def ready(self, request: Request) -> Response:
        num_quarantined = await self._count_quarantined() if self._count_quarantined is not None else 0
        if self._is_draining():
            message = "this gateway is about to stop: ask another one"
            response = error_response(UnavailableError(message, code="draining", retry_after_s=1))
        elif await self._backend.is_ready():
            status = "degraded" if num_quarantined else "ready"
            response = Response(to_json_bytes({"status": status}), media_type="application/json")
        elif num_quarantined:
            message = "every worker is quarantined after an isolation violation"
            response = error_response(UnavailableError(message, code="quarantined"))
        else:
            response = error_response(UnavailableError("no worker can answer yet", code="not_ready", retry_after_s=1))
        if self._count_quarantined is not None:
            response.headers[QUARANTINED_HEADER] = str(num_quarantined)
        if self._count_workers is not None:
            response.headers[WORKERS_HEADER] = str(await self._count_workers())
        return response

    async def metrics(self, request: Request) -> Response:
        if not request.state.principal.is_operator:
            raise PermissionDeniedError("metrics need an operator's key")
        return Response(await self._metrics.scrape(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, request: Request) -> Response:
        return Response(to_json_bytes({"version": self._version}), media_type="application/json")
