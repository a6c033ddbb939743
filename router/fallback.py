"""Placement without the router: what a gateway does while the router is gone.

The same Router with another policy and a gateway's share of everything: of each worker's places, of the queue, of the
tenants' rates. So a lost router is no way around its limits, whatever the number of gateways.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.api.ids import BlockKey, RequestId, WorkerId
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.worker_state import WorkerInfo
from router.circuit import FailureKind
from router.config import CircuitConfig, RouterConfig, TenantLimits
from router.policies.consistent import ConsistentHashPolicy
from router.router import Router
from router.settings import RouterSettings


@dataclass(frozen=True)
class FallbackConfig:
    num_gateways: int = 1  # that share the workers while there is no router
    load_factor: float = 1.25  # see ConsistentHashPolicy
    cooldown_s: float = 5.0  # how long a worker that could not be reached is left alone

    def __post_init__(self) -> None:
        if not 1 <= self.num_gateways <= 100_000:
            raise ValueError(f"num_gateways is {self.num_gateways}, allowed are 1 to 100000")
        if not 0.01 <= self.cooldown_s <= 600:
            raise ValueError(f"cooldown_s is {self.cooldown_s}, allowed are 0.01 to 600")
        ConsistentHashPolicy(self.load_factor)


class FallbackRouter:
    """Knows only the workers it was told of and this gateway's own requests. For one event loop."""

    def __init__(
        self,
        config: FallbackConfig | None = None,
        settings: RouterSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config = config or FallbackConfig()
        settings = settings or RouterSettings()
        share = 1.0 / config.num_gateways
        self._clock = clock
        self._router = Router(
            _NoIndex(),
            _share_of_config(settings.config, share, config.cooldown_s),
            policy=ConsistentHashPolicy(config.load_factor),
            tenant_limits={tenant: _share_of_limits(limits, share) for tenant, limits in settings.tenant_limits},
            clock=clock,
            unix_clock=unix_clock,
        )

    def update(self, workers: Iterable[WorkerInfo]) -> None:
        """The workers as last known to take work."""
        known = {info.worker_id: info for info in workers}
        for record in self._router.registry.records():
            if record.info.worker_id not in known:
                self._router.forget(record.info.worker_id)
        for info in known.values():
            share = replace(info, max_num_seqs=math.ceil(info.max_num_seqs / self._config.num_gateways), is_warm=True)
            self._router.register(share)
            registered = self._router.registry.get(info.worker_id)
            assert registered is not None
            registered.info = share  # within a life, the number of places changes with `max_num_seqs: auto`
            registered.load.candidate.max_num_seqs = share.max_num_seqs

    async def route(self, query: RouteQuery) -> RouteDecision:
        """Raises what the router raises; call `release` in a `finally`."""
        self._keep_alive()
        return await self._router.route(query)

    def first_token(self, request_id: RequestId, worker_id: WorkerId) -> None:
        self._router.first_token(request_id, worker_id)

    def release(self, request_id: RequestId, worker_id: WorkerId) -> None:
        self._keep_alive()  # those who wait get the place only on a worker that counts as alive
        self._router.release(request_id, worker_id)

    def worker_failed(self, worker_id: WorkerId, epoch: str) -> None:
        """Leaves that life of the worker alone for a while; another life is not concerned."""
        self._router.worker_failed(worker_id, epoch, FailureKind.CONNECT)

    def num_running(self, worker_id: WorkerId) -> int:
        record = self._router.registry.get(worker_id)
        return 0 if record is None else record.load.candidate.num_running

    def _keep_alive(self) -> None:
        """Without a router nobody brings heartbeats: a worker is there until a connection to it fails."""
        now_s = self._clock()
        for record in self._router.registry.records():
            record.last_seen_s = now_s


class _NoIndex:
    """Nobody knows who holds what."""

    def match(self, keys: Sequence[BlockKey]) -> Mapping[WorkerId, int]:
        return {}

    def speculate(self, worker_id: WorkerId, keys: Sequence[BlockKey], ttl_s: float) -> None: ...

    def expect_epoch(self, worker_id: WorkerId, epoch: str) -> None: ...

    def drop_worker(self, worker_id: WorkerId) -> None: ...


def _share_of_config(config: RouterConfig, share: float, cooldown_s: float) -> RouterConfig:
    admission = replace(
        config.admission,
        max_queued_requests=math.ceil(config.admission.max_queued_requests * share),
        default_limits=_share_of_limits(config.admission.default_limits, share),
    )
    # One failure is enough: there is nobody else's experience to wait for.
    circuit = CircuitConfig(failure_threshold=1, cooldown_s=cooldown_s, max_cooldown_s=max(cooldown_s, 30.0))
    return replace(config, heartbeat_ttl_s=600.0, admission=admission, circuit=circuit)


def _share_of_limits(limits: TenantLimits, share: float) -> TenantLimits:
    """At least one request a minute: a share must not turn a small allowance into none."""
    return TenantLimits(
        limits.weight, _share_of(limits.requests_per_min, share), _share_of(limits.tokens_per_min, share)
    )


def _share_of(per_min: float | None, share: float) -> float | None:
    return None if per_min is None else max(1.0, per_min * share)
