"""RemoteRouter: the router actor as a gateway sees it, with a way to go on while the actor is gone.

Notes that nobody waits for (first token, release, failure) leave in one message per flush. When the actor cannot be
reached, a local fallback places requests by consistent hashing with bounded load over the workers last heard of.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray

from cluster.api.errors import UnavailableError
from cluster.api.ids import RequestId, WorkerId
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.worker_state import WorkerInfo
from router.actor import ROUTER_NAMESPACE, router_name
from router.fallback import FallbackRouter
from router.stats import RouterStats

logger = logging.getLogger(__name__)

FLUSH_PERIOD_S = 0.02
WORKERS_PERIOD_S = 1.0
ROUTE_TIMEOUT_S = 90.0  # longer than the router's own queue wait


class RemoteRouter:
    """Implements cluster.dispatch.RouterClient. Start it on the event loop that uses it."""

    def __init__(self, app_name: str) -> None:
        self._name = router_name(app_name)
        self._actor: Any = None
        self._fallback = FallbackRouter()
        self._notes: list[tuple[str, tuple[Any, ...]]] = []
        self._is_up = True
        self._tasks: list[asyncio.Task[None]] = []
        self.members: tuple[WorkerInfo, ...] = ()  # as last heard of, also those that take no work yet
        self._workers: tuple[WorkerInfo, ...] = ()  # those that take work
        self._has_worker = asyncio.Event()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._flush_forever()), asyncio.create_task(self._watch_workers())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._flush()

    async def route(self, query: RouteQuery) -> RouteDecision:
        try:
            decision = await asyncio.wait_for(self._handle().route.remote(query), ROUTE_TIMEOUT_S)
        except (ray.exceptions.RayActorError, ValueError, TimeoutError):
            return self._route_locally(query)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else UnavailableError("the router failed") from None
        self._note_up(True)
        return decision

    def first_token(self, request_id: RequestId) -> None:
        self._notes.append(("first_token", (request_id,)))

    def release(self, request_id: RequestId) -> None:
        self._fallback.release(request_id)
        self._notes.append(("release", (request_id,)))

    def worker_failed(self, worker_id: WorkerId, epoch: str) -> None:
        self._fallback.worker_failed(worker_id, epoch)
        self._notes.append(("worker_failed", (worker_id, epoch)))

    @property
    def num_workers(self) -> int:
        """Live workers as last heard of."""
        return len(self._workers)

    async def is_ready(self) -> bool:
        return bool(self._workers)

    async def first_worker(self) -> WorkerInfo:
        """Waits until a worker has registered."""
        await self._has_worker.wait()
        return self.members[0]

    async def stats(self) -> RouterStats | None:
        """None while the router is gone."""
        try:
            stats: RouterStats = await asyncio.wait_for(self._handle().stats.remote(), 2.0)
        except (ray.exceptions.RayError, ValueError, TimeoutError):
            return None
        return stats

    def _route_locally(self, query: RouteQuery) -> RouteDecision:
        self._note_up(False)
        return self._fallback.route(query)

    def _handle(self) -> Any:
        # Looked up again after every failure: a recreated actor has a new handle under the old name.
        if self._actor is None:
            self._actor = ray.get_actor(self._name, namespace=ROUTER_NAMESPACE)
        return self._actor

    def _note_up(self, is_up: bool) -> None:
        if is_up != self._is_up:
            logger.warning("router is %s", "back" if is_up else "gone: placing requests locally")
        self._is_up = is_up
        if not is_up:
            self._actor = None

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_PERIOD_S)
            await self._flush()

    async def _flush(self) -> None:
        if not self._notes:
            return
        notes, self._notes = self._notes, []
        try:
            self._handle().notes.remote(notes)
        except (ray.exceptions.RayError, ValueError):
            self._actor = None  # a router that lost these notes heals from the workers' snapshots

    async def _watch_workers(self) -> None:
        while True:
            started = time.monotonic()
            try:
                members = await asyncio.wait_for(self._handle().members.remote(), 2.0)
                self.members = tuple(info for info, _ in members)
                self._workers = tuple(info for info, is_live in members if is_live)
                self._fallback.update(self._workers)
                if self.members:
                    self._has_worker.set()
                self._note_up(True)
            except (ray.exceptions.RayError, ValueError, TimeoutError):
                self._note_up(False)
            period = WORKERS_PERIOD_S if self._workers else 0.1
            await asyncio.sleep(max(0.0, period - (time.monotonic() - started)))
