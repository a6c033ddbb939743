"""The router as a Ray actor: one per application, found by name, restarted by Ray, rebuilt from Redis and workers.

Workers' heartbeats and rare questions are calls to the actor; placements go over its own stream (router/channel.py).
"""

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
from cluster.api.errors import UnavailableError
from cluster.api.ids import WorkerId, new_epoch
from cluster.api.precedence import yield_to_engines
from cluster.api.router_channel import RouterAddress
from cluster.api.secret import channel_token
from cluster.api.worker_state import WorkerInfo, WorkerSnapshot
from router.channel import RouterChannel
from router.policies.catalog import make_policy
from router.router import Router
from router.settings import RouterSettings
from router.stats import RouterStats

logger = logging.getLogger(__name__)

ROUTER_NAMESPACE = "watchword"
_ASK_AGAIN_S = 0.2
_NOMINAL_BYTES = 1 << 20


def router_name(app_name: str) -> str:
    return f"router:{app_name}"


class RouterActor:
    """Thin shell: every decision is the plain Router's. Async: all of it on one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        yield_to_engines()
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
        self._epoch = new_epoch()
        self._channel = self._make_channel()
        self._address: str | None = None
        self._opening = asyncio.Lock()

    async def settings(self) -> RouterSettings:
        """What it was made with."""
        return self._settings

    async def channel(self) -> RouterAddress:
        """Where gateways ask for placements. Listens from the first call on, since a constructor has no event loop."""
        self._follow()
        if self._channel is None:
            raise UnavailableError("this router was made without the cluster secret")
        async with self._opening:
            if self._address is None:
                self._address = await self._channel.start()
        return RouterAddress(self._address, self._epoch)

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

    def _make_channel(self) -> RouterChannel | None:
        settings = self._settings
        if settings.secret_file is None:
            return None
        host = ray.util.get_node_ip_address() if settings.channel_host == "node" else settings.channel_host
        token = channel_token(settings.secret_file.read_bytes().strip())
        return RouterChannel(self._router, token, self._epoch, host)

    def _follow(self) -> None:
        """Starts reading the index with the first call, since a constructor has no event loop."""
        if self._follower is not None and self._task is None:
            self._task = asyncio.create_task(self._follower.run())


def find_router(app_name: str) -> Any:
    """The actor's handle. Raises ValueError when there is none."""
    return ray.get_actor(router_name(app_name), namespace=ROUTER_NAMESPACE)


def create_router(app_name: str, settings: RouterSettings) -> Any:
    """The actor's handle; whoever comes first makes it. It outlives its maker and is restarted when it dies."""
    actor_class = ray.remote(RouterActor)
    return actor_class.options(
        **beside(ray.get_runtime_context().get_node_id()),
        name=router_name(app_name),
        namespace=ROUTER_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
    ).remote(settings)


def beside(node_id: str) -> dict[str, Any]:
    """Ray's options for an actor that lives on this node, or elsewhere once it is gone.

    Left to itself Ray puts an actor that needs nothing on any node, whatever its affinity, and then the loss of a node
    that only has an engine takes the router from all gateways. Hence the memory, too little to be refused.
    """
    affinity = NodeAffinitySchedulingStrategy(node_id, soft=True)
    return {"num_cpus": 0, "memory": _NOMINAL_BYTES, "scheduling_strategy": affinity}


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
