"""RemoteRouter: the router actor as a gateway sees it, with a way to go on while the actor is gone.

Notes that nobody waits for (first token, release, failure) leave in one message per flush. When the actor cannot be
reached, a local fallback places requests by consistent hashing with bounded load over the workers last heard of, within
this gateway's share of the limits.
Whether the actor can be reached is asked apart from routing: a route call may rightly wait for a minute in the
router's queue, an actor that does not say who its members are for 3 s is gone or hangs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from cluster.api.errors import UnavailableError
from cluster.api.ids import RequestId, WorkerId
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.worker_state import WorkerInfo
from router.actor import find_router
from router.fallback import FallbackRouter
from router.stats import RouterStats

logger = logging.getLogger(__name__)

FLUSH_PERIOD_S = 0.02
WATCH_PERIOD_S = 1.0
IMPATIENT_PERIOD_S = 0.1  # while there is no worker or no router
SILENCE_S = 3.0
FORGET_MEMBERS_S = 10.0  # a router that has just been restarted has not heard from the workers yet


class RemoteRouter:
    """Implements cluster.dispatch.RouterClient. Start it on the event loop that uses it."""

    def __init__(
        self,
        app_name: str,
        find_actor: Callable[[str], Any] = find_router,
        *,
        fallback: FallbackRouter | None = None,
    ) -> None:
        self._app_name = app_name
        self._find_actor = find_actor
        self._actor: Any = None
        self._fallback = fallback or FallbackRouter()
        self._notes: list[tuple[str, tuple[Any, ...]]] = []
        self._down = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.members: tuple[WorkerInfo, ...] = ()  # as last heard of, also those that take no work yet
        self._workers: tuple[WorkerInfo, ...] = ()  # those that take work
        self._heard_of_s = 0.0
        self._has_worker = asyncio.Event()
        self.num_local_routes = 0

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._flush_forever()), asyncio.create_task(self._watch_forever())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._flush()

    async def route(self, query: RouteQuery) -> RouteDecision:
        """Raises what the router raises. Without a router that answers, this gateway decides alone."""
        if not self._down.is_set():
            decision = await self._ask(query)
            if decision is not None:
                return decision
        self.num_local_routes += 1
        return await self._fallback.route(query)

    def first_token(self, request_id: RequestId, worker_id: WorkerId) -> None:
        self._fallback.first_token(request_id, worker_id)
        self._notes.append(("first_token", (request_id, worker_id)))

    def release(self, request_id: RequestId, worker_id: WorkerId) -> None:
        self._fallback.release(request_id, worker_id)
        self._notes.append(("release", (request_id, worker_id)))

    def worker_failed(self, worker_id: WorkerId, epoch: str) -> None:
        self._fallback.worker_failed(worker_id, epoch)
        self._notes.append(("worker_failed", (worker_id, epoch)))

    @property
    def live_workers(self) -> tuple[WorkerInfo, ...]:
        """Those that take work, as last heard of."""
        return self._workers

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

    async def indexed(self) -> dict[WorkerId, frozenset[bytes]] | None:
        """Fingerprints of the blocks that each worker is believed to hold; None while the router is gone."""
        try:
            indexed: dict[WorkerId, frozenset[bytes]] = await asyncio.wait_for(self._handle().indexed.remote(), 10.0)
        except (ray.exceptions.RayError, ValueError, TimeoutError):
            return None
        return indexed

    async def _ask(self, query: RouteQuery) -> RouteDecision | None:
        """None when the actor dies or falls silent meanwhile."""
        asked = asyncio.ensure_future(self._decision(query))
        down = asyncio.ensure_future(self._down.wait())
        is_answered = False
        try:
            await asyncio.wait((asked, down), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return None
            is_answered = True
            return asked.result()
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else UnavailableError("the router failed") from None
        except (ray.exceptions.RayError, ValueError):
            self._note_up(False)
            return None
        finally:
            down.cancel()
            if not is_answered:  # also when the client has gone: cancelling the wait does not reach the actor
                asked.cancel()
                self._notes.append(("withdraw", (query.request_id,)))

    async def _decision(self, query: RouteQuery) -> RouteDecision:
        decision: RouteDecision = await self._handle().route.remote(query)
        return decision

    def _handle(self) -> Any:
        # Looked up again after every failure: a recreated actor has a new handle under the old name.
        if self._actor is None:
            self._actor = self._find_actor(self._app_name)
        return self._actor

    def _note_up(self, is_up: bool) -> None:
        if is_up == self._down.is_set():
            logger.warning("router is %s", "back" if is_up else "gone: placing requests locally")
        if is_up:
            self._down.clear()
        else:
            self._down.set()
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

    async def _watch_forever(self) -> None:
        while True:
            started = time.monotonic()
            try:
                self._take_members(await asyncio.wait_for(self._handle().members.remote(), SILENCE_S))
                self._note_up(True)
            except (ray.exceptions.RayError, ValueError, TimeoutError):
                self._note_up(False)
            period = WATCH_PERIOD_S if self._workers and not self._down.is_set() else IMPATIENT_PERIOD_S
            await asyncio.sleep(max(0.0, period - (time.monotonic() - started)))

    def _take_members(self, members: list[tuple[WorkerInfo, bool]]) -> None:
        now = time.monotonic()
        if not members and now - self._heard_of_s < FORGET_MEMBERS_S:
            return
        self._heard_of_s = now
        self.members = tuple(info for info, _ in members)
        self._workers = tuple(info for info, is_live in members if is_live)
        self._fallback.update(self._workers)
        if self.members:
            self._has_worker.set()
