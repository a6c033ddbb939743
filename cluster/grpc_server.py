"""The gRPC front door of one gateway replica: its address, limits, TLS, health, reflection, and an orderly stop.

It is a server of our own beside Ray Serve. Serve's gRPC proxy binds every interface, has no TLS and no
grpc.health.v1, cannot see a deadline, and answers an exception with a Ray traceback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.api.errors import InvalidRequestError
from cluster.auth.authenticator import Authenticator
from cluster.auth.proxy import IdentityHeaders
from cluster.grpc_health import HealthReporter
from cluster.grpc_service import SERVICE_NAME, GenerationService
from cluster.serving.core import ServingCore


@dataclass(frozen=True, slots=True)
class GrpcServerConfig:
    """Ports are shared between the replicas of a machine (SO_REUSEPORT), except port 0, which means any free one."""

    host: str = "127.0.0.1"
    port: int = 9000
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    # Reflection answers without a credential: it shows the API, which is public, but also that this server is here.
    # Leave it off where API keys are configured.
    is_reflection_on: bool = False
    max_request_bytes: int = 8 << 20
    request_timeout_s: float = 600.0
    readiness_period_s: float = 1.0
    # A connection stays with one replica for as long as it lives; renewing it spreads callers over new replicas.
    max_connection_age_s: float = 900.0
    debug_metadata: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, must be in [0, 65535]")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file are needed together")
        for name in ("max_request_bytes", "request_timeout_s", "readiness_period_s", "max_connection_age_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")


class GrpcServer:
    """Start once, stop once."""

    def __init__(self, server: grpc.aio.Server, health_reporter: HealthReporter, port: int) -> None:
        self.port = port
        self._server = server
        self._health = health_reporter

    async def start(self) -> None:
        await self._health.start()
        await self._server.start()

    async def tell_health(self) -> None:
        """Publishes now what would be published within a period."""
        await self._health.publish()

    async def stop(self, grace_s: float) -> None:
        """Health turns first, so that balancers leave; then no new calls, and running ones get `grace_s` to end."""
        self._health.stop()
        await self._server.stop(grace_s)


def build_grpc_server(
    core: ServingCore,
    authenticator: Authenticator,
    config: GrpcServerConfig,
    identity_headers: IdentityHeaders | None = None,
    is_draining: Callable[[], bool] = lambda: False,
) -> GrpcServer:
    """Bound but not started. Raises InvalidRequestError when the address or a TLS file cannot be used."""
    server = grpc.aio.server(options=_options(config))
    service = GenerationService(
        core,
        authenticator,
        identity_headers or IdentityHeaders((), ()),
        request_timeout_s=config.request_timeout_s,
        debug_metadata=config.debug_metadata,
    )
    server.add_generic_rpc_handlers((service.handler(),))

    async def is_ready() -> bool:
        return not is_draining() and await core.backend.is_ready()

    health_reporter = HealthReporter(SERVICE_NAME, is_ready, config.readiness_period_s)
    health_pb2_grpc.add_HealthServicer_to_server(health_reporter.servicer, server)
    if config.is_reflection_on:
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return GrpcServer(server, health_reporter, _bind(server, config))


def _options(config: GrpcServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 1 if config.port else 0),
        ("grpc.max_receive_message_length", config.max_request_bytes),
        # An old connection takes no new calls; those that run on it may end.
        ("grpc.max_connection_age_ms", int(config.max_connection_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", int(config.request_timeout_s * 1000) + 1000),
        # Finds callers that vanished without a word, so that their requests are aborted.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Callers may ping too, also while nothing runs; without this they would be sent away (too_many_pings).
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _bind(server: grpc.aio.Server, config: GrpcServerConfig) -> int:
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    try:
        if config.tls_cert_file is None or config.tls_key_file is None:
            return int(server.add_insecure_port(address))
        pair = (config.tls_key_file.read_bytes(), config.tls_cert_file.read_bytes())
        return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
    except OSError as error:
        raise InvalidRequestError(f"TLS file {error.filename}: {error.strerror}") from None
    except RuntimeError:
        raise InvalidRequestError(f"gRPC cannot listen on {address}: the address is in use or not ours") from None
