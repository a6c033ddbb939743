"""Keeps grpc.health.v1 true: "" means that the process lives, the service's name that a worker can answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from grpc_health.v1 import health, health_pb2

logger = logging.getLogger(__name__)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthReporter:
    """Asks `is_ready` once a period and publishes changes, so that both Check and Watch see them."""

    def __init__(self, service_name: str, is_ready: Callable[[], Awaitable[bool]], period_s: float) -> None:
        self.servicer = health.aio.HealthServicer()
        self._service_name = service_name
        self._is_ready = is_ready
        self._period_s = period_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._publish()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Everything reads NOT_SERVING from here on."""
        if self._task is not None:
            self._task.cancel()
        await self.servicer.enter_graceful_shutdown()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self._publish()

    async def _publish(self) -> None:
        try:
            # A backend that does not answer in time is not ready either.
            is_ready = await asyncio.wait_for(self._is_ready(), timeout=max(1.0, self._period_s))
        except Exception as error:
            logger.warning("readiness is unknown: %s", type(error).__name__)
            is_ready = False
        await self.servicer.set(self._service_name, SERVING if is_ready else NOT_SERVING)
