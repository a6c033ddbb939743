"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, for operators: names and answers are vLLM's."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cluster.adapters import AdapterManager
from cluster.api.errors import InvalidRequestError, PermissionDeniedError
from cluster.http.config import HttpConfig
from cluster.http.json_body import read_json

_MAX_NAME_CHARS = 128


class AdapterRoutes:
    def __init__(self, adapters: AdapterManager, config: HttpConfig) -> None:
        self._adapters = adapters
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        body = await self._read(request, {"lora_name", "lora_path", "load_inplace"})
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        replaces = body.get("load_inplace", False)
        if not isinstance(replaces, bool):
            raise InvalidRequestError("load_inplace must be true or false", param="load_inplace")
        await self._adapters.load(name, path, replaces=replaces)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        body = await self._read(request, {"lora_name", "lora_int_id"})
        name = _text(body, "lora_name")
        await self._adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _read(self, request: Request, known: set[str]) -> dict[str, Any]:
        if not request.state.principal.is_operator:
            raise PermissionDeniedError("adapters are loaded and unloaded with an operator's key")
        body = await read_json(request, self._config)
        for field in body:
            if field not in known:
                raise InvalidRequestError(f"there is no field {field[:64]!r}", param=field[:64])
        return body


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise InvalidRequestError(f"{field} must be text", param=field)
    if field == "lora_name" and len(value) > _MAX_NAME_CHARS:
        raise InvalidRequestError(f"lora_name has {len(value)} characters, at most {_MAX_NAME_CHARS} go", param=field)
    return value
