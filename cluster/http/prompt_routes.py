"""GET /v1/prompts and GET|PUT|DELETE /v1/prompts/{id}: registered prompt templates, for operators and delegates.

Ids live in the tenant: another tenant's id answers exactly as one that does not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.api.errors import InvalidRequestError, PermissionDeniedError
from cluster.api.principal import Principal
from cluster.http.config import HttpConfig
from cluster.http.json_body import read_json
from cluster.openai.json_text import to_json_bytes
from cluster.prompts.cardinality import CardinalityWatch
from cluster.prompts.catalog import TemplateCatalog
from cluster.prompts.store import RegisteredTemplate
from cluster.prompts.wire import deleted_object, template_list, template_object

OnChange = Callable[[bytes | None], Awaitable[None]]


class PromptRoutes:
    """`on_change` is awaited after every registration and deletion, with the owner's hash (None: public): the assembly
    warms workers up there."""

    def __init__(
        self,
        catalog: TemplateCatalog,
        watch: CardinalityWatch,
        config: HttpConfig,
        *,
        on_change: OnChange | None = None,
    ) -> None:
        self._catalog = catalog
        self._watch = watch
        self._config = config
        self._on_change = on_change

    def routes(self) -> list[Route]:
        return [
            Route("/v1/prompts", self.list_prompts, methods=["GET"]),
            Route("/v1/prompts/{prompt_id}", self.retrieve, methods=["GET"]),
            Route("/v1/prompts/{prompt_id}", self.put, methods=["PUT"]),
            Route("/v1/prompts/{prompt_id}", self.delete, methods=["DELETE"]),
        ]

    async def list_prompts(self, request: Request) -> Response:
        """The tenant's own, then the public ones that they do not hide."""
        tenant = self._hash_of(_administrator(request))
        own = await asyncio.to_thread(self._catalog.store.list_latest, tenant)
        public = await asyncio.to_thread(self._catalog.store.list_latest, None)
        hidden = {registered.id for registered in own}
        shown = [*own, *(registered for registered in public if registered.id not in hidden)]
        return _json(template_list(shown))

    async def retrieve(self, request: Request) -> Response:
        tenant = self._hash_of(_administrator(request))
        version = request.query_params.get("version")
        prompt_id = request.path_params["prompt_id"]
        return self._answer(await asyncio.to_thread(self._catalog.store.get, tenant, prompt_id, version))

    async def put(self, request: Request) -> Response:
        principal = _administrator(request)
        body = await read_json(request, self._config)
        registered = await asyncio.to_thread(
            self._catalog.put,
            principal.tenant,
            request.path_params["prompt_id"],
            body,
            is_operator=principal.is_operator,
        )
        await self._tell(registered.tenant)
        return self._answer(registered)

    async def delete(self, request: Request) -> Response:
        principal = _administrator(request)
        is_public = _flag(request, "public")
        if is_public and not principal.is_operator:
            raise PermissionDeniedError("only an operator can delete a public prompt template", param="public")
        prompt_id = request.path_params["prompt_id"]
        await asyncio.to_thread(self._catalog.delete, principal.tenant, prompt_id, is_public=is_public)
        await self._tell(None if is_public else self._hash_of(principal))
        return _json(deleted_object(prompt_id))

    def _hash_of(self, principal: Principal) -> bytes:
        return self._catalog.keyer.identity("tenant", principal.tenant)

    def _answer(self, registered: RegisteredTemplate) -> Response:
        return _json(template_object(registered, self._watch.suspicious(registered.tenant, registered.id)))

    async def _tell(self, owner: bytes | None) -> None:
        if self._on_change is not None:
            await self._on_change(owner)


def _administrator(request: Request) -> Principal:
    principal: Principal = request.state.principal
    if not (principal.is_operator or principal.is_delegate):
        raise PermissionDeniedError("prompt templates need an operator's or a delegate's key")
    return principal


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequestError(f"{name} must be true or false", param=name)
    return text == "true"


def _json(value: object) -> Response:
    return Response(to_json_bytes(value), media_type="application/json")
