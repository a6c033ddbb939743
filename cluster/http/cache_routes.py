"""DELETE /v1/users/{user}/cache: ends all reuse of what was cached for one user, by that user or a delegate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.api.errors import PermissionDeniedError
from cluster.api.principal import Principal
from cluster.auth.caller import resolve_identity
from cluster.auth.names import check_name
from cluster.openai.json_text import to_json_bytes
from cluster.serving.core import ServingCore
from cluster.serving.generate_input import CallerFields

# Removes a user's blocks on every worker and returns how many; the argument is the user's hash.
PurgeUser = Callable[[bytes], Awaitable[int]]


class CacheRoutes:
    """A user that never was and one without cached blocks answer alike: nothing was removed."""

    def __init__(self, core: ServingCore, purge_user: PurgeUser) -> None:
        self._core = core
        self._purge_user = purge_user

    def routes(self) -> list[Route]:
        return [Route("/v1/users/{user}/cache", self.delete, methods=["DELETE"])]

    async def delete(self, request: Request) -> Response:
        principal: Principal = request.state.principal
        user = check_name("user", request.path_params["user"])
        num_blocks = 0
        for user_hash in self._hashes_of(principal, user):
            num_blocks += await self._purge_user(user_hash)
        body = {"object": "user.cache.deleted", "num_blocks": num_blocks}
        return Response(to_json_bytes(body), media_type="application/json")

    def _hashes_of(self, principal: Principal, user: str) -> set[bytes]:
        """One for all models, unless their secrets differ. Users nested below the named one are covered."""
        if principal.user_path:
            if principal.user_path != (user,):
                raise PermissionDeniedError("this key may only delete its own user's cache")
            caller = CallerFields()
        elif user == principal.key_id:
            caller = CallerFields()  # the credential itself is the user
        elif principal.is_delegate:
            caller = CallerFields(user=user)
        else:
            raise PermissionDeniedError(
                "deleting a user's cache needs that user's key or a delegate's; a key that is no user's deletes its "
                "own under its key id"
            )
        return {resolve_identity(principal, caller, model.keyer).user for model in self._core.models}
