"""POST /tokenize and /detokenize, with and without /v1 in front: peers and benchmark tools use both spellings."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.api.errors import InvalidRequestError
from cluster.http.config import HttpConfig
from cluster.http.context import CallContexts
from cluster.http.json_body import read_json
from cluster.openai.json_text import to_json_bytes
from cluster.openai.tokenize_wire import DetokenizeRequest, TokenizeRequest
from cluster.serving.core import ServingCore


class TokenRoutes:
    def __init__(self, core: ServingCore, config: HttpConfig) -> None:
        self._core = core
        self._config = config
        self._contexts = CallContexts(config)

    def routes(self) -> list[Route]:
        routes = []
        for prefix in ("", "/v1"):
            routes.append(Route(f"{prefix}/tokenize", self.tokenize, methods=["POST"]))
            routes.append(Route(f"{prefix}/detokenize", self.detokenize, methods=["POST"]))
        return routes

    async def tokenize(self, request: Request) -> Response:
        call = self._contexts.of(request)
        wire = TokenizeRequest.parse(await read_json(request, self._config))
        caller = wire.caller_fields(call.header_user)
        prompt = await self._core.tokenize(call.principal, wire.model, wire.prompt_input(), caller)
        model, _ = self._core.find_model(wire.model)
        token_ids = prompt.token_ids
        body = {
            "count": len(token_ids),
            "max_model_len": model.info.max_model_len,
            "tokens": token_ids,
            "token_strs": [model.tokens.text_of(i) for i in token_ids] if wire.return_token_strs else None,
        }
        return Response(to_json_bytes(body), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        wire = DetokenizeRequest.parse(await read_json(request, self._config))
        model, _ = self._core.find_model(wire.model)
        for token_id in wire.tokens:
            if not 0 <= token_id < model.info.vocab_size:
                raise InvalidRequestError(
                    f"a token id is out of range: must be in [0, {model.info.vocab_size - 1}]", param="tokens"
                )
        return Response(to_json_bytes({"prompt": model.tokens.decode(wire.tokens)}), media_type="application/json")
