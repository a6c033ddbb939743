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

    @classmethod
    def of(cls, request: Request, config: HttpConfig) -> CallContext:
        principal: Principal = request.state.principal
        identity_headers = IdentityHeaders(config.trusted_proxies, config.identity_headers)
        peer = None if request.client is None else request.client.host
        return cls(
            request_id=request.state.request_id,
            principal=principal,
            header_user=identity_headers.user_of(peer, request.headers.items()),
            timeout_s=config.request_timeout_s,
            shows_worker=principal.is_operator or config.debug_headers,
        )

    def debug_headers(self, group: GenerationGroup) -> dict[str, str]:
        """Which worker answered: for operators, and for everyone where it is switched on."""
        if not self.shows_worker or not group.worker_ids:
            return {}
        return {WORKER_HEADER: ", ".join(group.worker_ids)}
