"""grpc.health.v1: "" means that the process lives, the service's name that a worker can answer.

Not the servicer of grpcio-health-checking: that one holds a lock while it writes to a watcher, so that one watcher that
stops reading would keep the status, and with it the shutdown, waiting for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

logger = logging.getLogger(__name__)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
OVERALL = ""


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Statuses by service name, and whoever watches them. Used on one event loop.

    `refresh` is awaited before a service's status is told to who asks for it once.
    """

    def __init__(self, statuses: dict[str, int], refresh: Callable[[str], Awaitable[None]]) -> None:
        self._statuses = dict(statuses)
        self._refresh = refresh
        self._is_stopping = False
        self._changed = asyncio.Event()  # set once, at the next change, and replaced then

    def set(self, service: str, status: int) -> None:
        """Without effect once stopped."""
        if not self._is_stopping and self._statuses.get(service) != status:
            self._statuses[service] = status
            self._wake()

    def stop(self) -> None:
        """Tells every watcher NOT_SERVING and lets it go: an open watch would hold up the server for all its grace."""
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        self._is_stopping = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        await self._refresh(request.service)
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        last = None
        while True:
            changed = self._changed  # before the status is read, so that no change falls in between
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            if self._is_stopping:
                return
            await changed.wait()


class HealthReporter:
    """Asks `is_ready` once a period, and whenever somebody checks, and publishes the answer under the service's name.

    A check that told the answer of a second ago would contradict /ready of the same gateway.
    """

    def __init__(self, service_name: str, is_ready: Callable[[], Awaitable[bool]], period_s: float) -> None:
        self.servicer = HealthServicer({OVERALL: SERVING, service_name: NOT_SERVING}, self._refresh)
        self._service_name = service_name
        self._is_ready = is_ready
        self._period_s = period_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.publish()
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Everything reads NOT_SERVING from here on."""
        if self._task is not None:
            self._task.cancel()
        self.servicer.stop()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self.publish()

    async def _refresh(self, service: str) -> None:
        if service == self._service_name:  # whether the process lives is not the backend's to say
            await self.publish()

    async def publish(self) -> None:
        """Asks and tells now."""
        try:
            # A backend that does not answer in time is not ready either.
            is_ready = await asyncio.wait_for(self._is_ready(), timeout=max(1.0, self._period_s))
        except Exception as error:
            logger.warning("readiness is unknown: %s", type(error).__name__)
            is_ready = False
        self.servicer.set(self._service_name, SERVING if is_ready else NOT_SERVING)
