"""What a handler knows of the call besides its body."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from cluster.api.ids import RequestId
from cluster.api.principal import Principal
from cluster.auth.proxy import IdentityHeaders
from cluster.http.config import HttpConfig
from cluster.serving.generation_group import GenerationGroup

WORKER_HEADER = "x-watchword-worker"


@dataclass(frozen=True, slots=True)
class CallContext:
    request_id: RequestId  # ours: a client's own id is only echoed
    principal: Principal
    header_user: str | None
    timeout_s: float
    shows_worker: bool

    def debug_headers(self, group: GenerationGroup) -> dict[str, str]:
        """Which worker answered: for operators, and for everyone where it is switched on."""
        if not self.shows_worker or not group.worker_ids:
            return {}
        return {WORKER_HEADER: ", ".join(group.worker_ids)}


class CallContexts:
    """Makes the context of each call from its request."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._identity_headers = IdentityHeaders(config.trusted_proxies, config.identity_headers)

    def of(self, request: Request) -> CallContext:
        """Raises InvalidRequestError when a trusted proxy names two users."""
        principal: Principal = request.state.principal
        peer = None if request.client is None else request.client.host
        return CallContext(
            request_id=request.state.request_id,
            principal=principal,
            header_user=self._identity_headers.user_of(peer, request.headers.items()),
            timeout_s=self._config.request_timeout_s,
            shows_worker=principal.is_operator or self._config.debug_headers,
        )
