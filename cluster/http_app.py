"""Builds the HTTP front door as one ASGI application. Binds nothing and starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Router
from starlette.types import Receive, Scope, Send

from cluster.auth.authenticator import Authenticator
from cluster.http.config import HttpConfig
from cluster.http.front import Front
from cluster.http.generation_routes import GenerationRoutes
from cluster.http.model_routes import ModelRoutes
from cluster.http.operation_routes import CountWorkers, OperationRoutes
from cluster.http.response_routes import ResponseRoutes
from cluster.http.token_routes import TokenRoutes
from cluster.metrics import GatewayMetrics
from cluster.serving.core import ServingCore


def build_http_app(
    core: ServingCore,
    authenticator: Authenticator,
    metrics: GatewayMetrics,
    config: HttpConfig,
    *,
    count_workers: CountWorkers | None = None,
    count_quarantined: CountWorkers | None = None,
    is_draining: Callable[[], bool] = lambda: False,
    extra_routes: Sequence[BaseRoute] = (),
) -> Front:
    """`extra_routes` come behind the same door: their handlers find `principal` and `request_id` in request.state."""
    router = Router(
        routes=[
            *GenerationRoutes(core, config).routes(),
            *ResponseRoutes(core, config).routes(),
            *TokenRoutes(core, config).routes(),
            *ModelRoutes(core).routes(),
            *OperationRoutes(
                core.backend, metrics, config.version, count_workers, count_quarantined, is_draining
            ).routes(),
            *extra_routes,
        ],
        redirect_slashes=False,
        default=_unknown_path,
    )
    return Front(_InApp(router), authenticator, metrics.http)


class _InApp:
    """Marks the scope as inside an application: routes then raise on a wrong method instead of answering in text."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("app", self)
        await self._router(scope, receive, send)


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000, "reason": ""})
        return
    raise HTTPException(status_code=404)
