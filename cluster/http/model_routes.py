"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.openai.json_text import to_json_bytes
from cluster.serving.core import ServedModel, ServingCore


class ModelRoutes:
    def __init__(self, core: ServingCore) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models, methods=["GET"]),
            # A path, because model names hold slashes: org/name.
            Route("/v1/models/{name:path}", self.retrieve, methods=["GET"]),
        ]

    async def list_models(self, request: Request) -> Response:
        data = []
        for model in self._core.models:
            data.append(_model_json(model, None))
            data.extend(_model_json(model, adapter) for adapter in model.adapter_digests)
        return _json({"object": "list", "data": data})

    async def retrieve(self, request: Request) -> Response:
        return _json(_model_json(*self._core.find_model(request.path_params["name"])))


def _model_json(model: ServedModel, adapter: str | None) -> dict[str, Any]:
    return {
        "id": adapter or model.info.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "watchword",
        "root": model.info.name,
        "parent": None if adapter is None else model.info.name,
        "max_model_len": model.info.max_model_len,
    }


def _json(value: Any) -> Response:
    return Response(to_json_bytes(value), media_type="application/json")
