"""RemoteRouter: the router actor as a gateway sees it, with a way to go on while the actor is gone.

Ray makes, finds and restarts the actor and says where it listens; questions and news go over a stream of our own, which
takes less than half the time of a call to an actor. When the router cannot be reached, a local fallback places requests
by consistent hashing with bounded load over the workers last heard of, within this gateway's share of the limits.
Whether the router hangs is asked apart from routing, by a call to the actor: a question may rightly wait for a minute
in the router's queue, an actor that does not say who its members are for 3 s is gone or hangs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from cluster.api.errors import UnavailableError
from cluster.api.ids import RequestId, WorkerId
from cluster.api.router_channel import FirstToken, Note, Release, RouterAddress, WorkerFailed
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.worker_state import WorkerInfo
from cluster.router_link import LAST_WORDS_S, RouterLink
from router.actor import find_router
from router.fallback import FallbackRouter
from router.stats import RouterStats

logger = logging.getLogger(__name__)

FLUSH_DELAY_S = 0.02  # news that nobody waits for travel together
WATCH_PERIOD_S = 1.0
IMPATIENT_PERIOD_S = 0.1  # while there is no worker or no router
SILENCE_S = 3.0
FORGET_MEMBERS_S = 10.0  # a router that has just been restarted has not heard from the workers yet


class RemoteRouter:
    """Implements cluster.dispatch.RouterClient. Start it on the event loop that uses it."""

    def __init__(
        self,
        app_name: str,
        token: str,
        find_actor: Callable[[str], Any] = find_router,
        *,
        fallback: FallbackRouter | None = None,
        watch_period_s: float = WATCH_PERIOD_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._app_name = app_name
        self._token = token
        self._find_actor = find_actor
        self._watch_period_s = watch_period_s
        self._silence_s = silence_s
        self._actor: Any = None
        self._link: RouterLink | None = None
        self._is_down = False
        self._is_news = asyncio.Event()  # for the watch: the link has broken
        self._fallback = fallback or FallbackRouter()
        self._notes: list[Note] = []
        self._has_notes = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.members: tuple[WorkerInfo, ...] = ()  # as last heard of, also those that take no work yet
        self._workers: tuple[WorkerInfo, ...] = ()  # those that take work
        self._heard_of_s = 0.0
        self._has_worker = asyncio.Event()
        self.num_local_routes = 0

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._flush_forever()), asyncio.create_task(self._watch_forever())]

    async def stop(self, patience_s: float = LAST_WORDS_S) -> None:
        """`patience_s`: for the router to take the last news."""
        for task in self._tasks:
            task.cancel()
        self._flush()
        if self._link is not None:
            await self._link.close(patience_s)

    async def route(self, query: RouteQuery) -> RouteDecision:
        """Raises what the router raises. Without a router that answers, this gateway decides alone."""
        if self._link is not None and not self._is_down:
            decision = await self._link.route(query)
            if decision is not None:
                return decision
        self.num_local_routes += 1
        return await self._fallback.route(query)

    def first_token(self, request_id: RequestId, worker_id: WorkerId) -> None:
        self._fallback.first_token(request_id, worker_id)
        self._note(FirstToken(request_id, worker_id))

    def release(self, request_id: RequestId, worker_id: WorkerId) -> None:
        self._fallback.release(request_id, worker_id)
        self._note(Release(request_id, worker_id))

    def worker_failed(self, worker_id: WorkerId, epoch: str) -> None:
        self._fallback.worker_failed(worker_id, epoch)
        self._note(WorkerFailed(worker_id, epoch))

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

    def _handle(self) -> Any:
        # Looked up again after every failure: a recreated actor has a new handle under the old name.
        if self._actor is None:
            self._actor = self._find_actor(self._app_name)
        return self._actor

    def _note_up(self, is_up: bool) -> None:
        if is_up == self._is_down:
            logger.warning("router is %s", "back" if is_up else "gone: placing requests locally")
        self._is_down = not is_up
        if not is_up:
            self._actor = None
            if self._link is not None:
                self._link.give_up()

    def _on_link_lost(self) -> None:
        self._note_up(False)
        self._is_news.set()

    def _note(self, note: Note) -> None:
        self._notes.append(note)
        self._has_notes.set()

    async def _flush_forever(self) -> None:
        while True:
            await self._has_notes.wait()
            await asyncio.sleep(FLUSH_DELAY_S)
            self._flush()

    def _flush(self) -> None:
        notes, self._notes = self._notes, []
        self._has_notes.clear()
        if notes and self._link is not None:
            self._link.tell(notes)  # a router that lost them heals from the workers' snapshots

    async def _watch_forever(self) -> None:
        while True:
            started = time.monotonic()
            self._is_news.clear()
            try:
                async with asyncio.timeout(self._silence_s):
                    await self._visit()
                self._note_up(True)
            except (ray.exceptions.RayError, ValueError, TimeoutError, UnavailableError):
                self._note_up(False)
            except Exception:
                logger.exception("asking for the router failed; trying again")
                self._note_up(False)
            if self._workers and not self._is_down:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._watch_period_s - (time.monotonic() - started)):
                        await self._is_news.wait()
            if (left_s := IMPATIENT_PERIOD_S - (time.monotonic() - started)) > 0:
                await asyncio.sleep(left_s)

    async def _visit(self) -> None:
        """Raises what says that the router is gone."""
        members = await self._handle().members.remote()
        try:
            if self._link is None or self._link.is_lost or self._is_down:
                await self._connect()
        finally:
            self._take_members(members)

    async def _connect(self) -> None:
        where: RouterAddress = await self._handle().channel.remote()
        if self._link is None or self._link.is_lost or self._link.epoch != where.epoch:
            if self._link is not None:
                await self._link.close()
            self._link = RouterLink(where, self._token, self._on_link_lost)
        if not await self._link.opened():
            raise UnavailableError("the router's stream does not open")

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
