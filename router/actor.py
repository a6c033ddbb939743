"""The router as a Ray actor: one per application, found by name, restarted by Ray, rebuilt from Redis and workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cache_service.index_follower import IndexFollower
from cache_service.prefix_index import InMemoryPrefixIndex
from cache_service.redis_index import IndexSettings
from cluster.api.ids import WorkerId
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.worker_state import WorkerInfo, WorkerSnapshot
from router.circuit import FailureKind
from router.policies.catalog import make_policy
from router.router import Router
from router.settings import RouterSettings
from router.stats import RouterStats

logger = logging.getLogger(__name__)

ROUTER_NAMESPACE = "watchword"
_ASK_AGAIN_S = 0.2
_NOMINAL_BYTES = 1 << 20  # Ray heeds where an actor should live only if it needs something


def router_name(app_name: str) -> str:
    return f"router:{app_name}"


class RouterActor:
    """Thin shell: every decision is the plain Router's. Async, so that waiting requests cost no thread."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._index = InMemoryPrefixIndex()
        self._router = Router(
            self._index,
            settings.config,
            # Ours is made by the Router itself, with the weights of the config.
            policy=None if settings.policy == "watchword" else make_policy(settings.policy),
            tenant_limits=dict(settings.tenant_limits),
        )
        self._snapshot_wanted: set[WorkerId] = set()
        self._follower: IndexFollower | None = None
        if settings.redis_url_file is not None:
            url = settings.redis_url_file.read_text(encoding="utf-8").strip()
            index = IndexSettings(settings.index_namespace)
            self._follower = IndexFollower(url, index, self._index, self._snapshot_wanted.add)
        self._task: asyncio.Task[None] | None = None

    async def settings(self) -> RouterSettings:
        """What it was made with."""
        return self._settings

    async def route(self, query: RouteQuery) -> RouteDecision:
        self._follow()
        return await self._router.route(query)

    async def notes(self, notes: list[tuple[str, tuple[Any, ...]]]) -> None:
        """Batched fire-and-forget calls of a gateway, in order."""
        for name, args in notes:
            match name:
                case "first_token":
                    self._router.first_token(*args)
                case "release":
                    self._router.release(*args)
                case "withdraw":
                    self._router.withdraw(*args)
                case "worker_failed":
                    worker_id, epoch = args
                    self._router.worker_failed(worker_id, epoch, FailureKind.CONNECT)

    async def register(self, info: WorkerInfo) -> None:
        self._router.register(info)

    async def report(self, snapshot: WorkerSnapshot) -> dict[str, bool]:
        """A worker's heartbeat. The answer asks it to register again, or to publish all its keys."""
        self._follow()
        is_known = self._router.report(snapshot)
        wants_snapshot = snapshot.worker_id in self._snapshot_wanted
        self._snapshot_wanted.discard(snapshot.worker_id)
        return {"register": not is_known, "publish_snapshot": wants_snapshot}

    async def members(self) -> list[tuple[WorkerInfo, bool]]:
        """Every registered worker, and whether it takes work: for readiness, warm-ups and the gateways' fallback."""
        self._follow()
        return self._router.members()

    async def stats(self) -> RouterStats:
        return self._router.stats()

    async def indexed(self) -> dict[WorkerId, frozenset[bytes]]:
        """Fingerprints of all blocks by the worker that is believed to hold them, for audits of the index."""
        return {worker_id: self._index.keys(worker_id) for worker_id in self._index.workers}

    async def num_indexed_blocks(self) -> int:
        return self._index.num_blocks

    def _follow(self) -> None:
        """Starts reading the index with the first call, since a constructor has no event loop."""
        if self._follower is not None and self._task is None:
            self._task = asyncio.create_task(self._follower.run())


def find_router(app_name: str) -> Any:
    """The actor's handle. Raises ValueError when there is none."""
    return ray.get_actor(router_name(app_name), namespace=ROUTER_NAMESPACE)


def create_router(app_name: str, settings: RouterSettings) -> Any:
    """The actor's handle; whoever comes first makes it. It outlives its maker and is restarted when it dies.

    It lives on its maker's node, or elsewhere once that one is gone. Left to itself Ray puts it on any node, and then
    the loss of one that only has an engine takes the router from all gateways.
    """
    actor_class = ray.remote(RouterActor)
    return actor_class.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
        name=router_name(app_name),
        namespace=ROUTER_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=10_000,
        num_cpus=0,
        memory=_NOMINAL_BYTES,
    ).remote(settings)


async def ensure_router(
    app_name: str,
    settings: RouterSettings,
    *,
    create: Callable[[str, RouterSettings], Any] = create_router,
    kill: Callable[[Any], None] = lambda actor: ray.kill(actor, no_restart=True),
    patience_s: float = 30.0,
) -> None:
    """Sees to it that the application's router has these settings, or those of a later deployment.

    A router with other settings is replaced, not told: Ray restarts an actor with what it was made with. Its
    gateways place locally meanwhile, and the new one is rebuilt from Redis and the workers' heartbeats. A router that
    does not say what it was made with is left alone: a redeployment must not end what merely hangs for a moment.
    """
    deadline_s = time.monotonic() + patience_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            actor = create(app_name, settings)
            if not settings.replaces(await asyncio.wait_for(actor.settings.remote(), left_s)):
                return
            logger.warning("the router's settings have changed: replacing it")
            kill(actor)
        except (ray.exceptions.RayError, ValueError, TimeoutError):
            pass  # it is being restarted, or the one that was killed still has the name
        await asyncio.sleep(_ASK_AGAIN_S)
    logger.error("the router does not say its settings: going on with those it has")
