"""Who may wait for a worker, and in which order: rate limits, a bounded fair queue, deadlines. Time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from cluster.api.errors import OverloadedError, RateLimitedError
from cluster.api.routing import RouteQuery
from router.config import AdmissionConfig, TenantLimits
from router.fair_queue import Entry, FairQueue
from router.rate_limit import RateLimit

MIN_RETRY_AFTER_S = 1.0

Placed = TypeVar("Placed")


@dataclass(slots=True)
class _Tenant:
    limits: TenantLimits
    rate: RateLimit
    last_seen_s: float


@dataclass(eq=False, slots=True)
class Waiting:
    """A request in the queue. `give_up_s` is the last moment at which a placement is of use to it."""

    query: RouteQuery
    give_up_s: float
    on_shed: OverloadedError | None = None


class Admission:
    """`limits` are by tenant hash; tenants without an entry get the configured default."""

    def __init__(self, config: AdmissionConfig, limits: Mapping[bytes, TenantLimits] | None = None) -> None:
        self._config = config
        self._limits = dict(limits or {})
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()  # least recently seen first
        self.queue: FairQueue[Waiting] = FairQueue()
        self._service_tokens_per_s = 0.0  # smoothed, measured while requests wait
        self._last_served_s: float | None = None

    def set_limits(self, tenant_hash: bytes, limits: TenantLimits) -> None:
        self._limits[tenant_hash] = limits
        self._tenants.pop(tenant_hash, None)

    def cost(self, query: RouteQuery) -> float:
        """Tokens charged for fairness: the prompt, and as much output as is expected."""
        return query.num_prompt_tokens + min(query.max_tokens, self._config.expected_output_tokens)

    def check_rate(self, query: RouteQuery, now_s: float) -> None:
        """Raises RateLimitedError when the tenant is beyond its requests or tokens per minute; else takes them."""
        wait_s = self._tenant(query.tenant_hash, now_s).rate.take(query.num_prompt_tokens + query.max_tokens, now_s)
        if wait_s > 0.0:
            raise RateLimitedError(
                f"this tenant's requests or tokens per minute are used up; try again in {wait_s:.1f} s",
                retry_after_s=max(MIN_RETRY_AFTER_S, wait_s),
            )

    def refund(self, query: RouteQuery) -> None:
        """The request was refused for want of capacity: that is not the tenant's doing."""
        tenant = self._tenants.get(query.tenant_hash)
        if tenant is not None:
            tenant.rate.charge(-1, -(query.num_prompt_tokens + query.max_tokens))

    def enqueue(self, waiting: Waiting, *, is_retry: bool, now_s: float) -> Entry[Waiting]:
        """A retry was charged before: it goes ahead of its tenant's fresh requests, in a flow of its own."""
        query = waiting.query
        weight = self._tenant(query.tenant_hash, now_s).limits.weight
        if is_retry:
            return self.queue.push((query.tenant_hash, "retry"), 0.0, weight, waiting)
        return self.queue.push(query.tenant_hash, self.cost(query), weight, waiting)

    def make_room(self) -> Waiting | None:
        """Keeps the bound: when too many wait, the newest of the tenant with most waiting tokens is turned away.

        Returns the request to refuse, with `on_shed` set, or None. It can be the one that has just come.
        """
        if len(self.queue) <= self._config.max_queued_requests:
            return None
        victim = self.queue.newest_of_longest()
        assert victim is not None
        self.queue.remove(victim)
        retry_after_s = max(MIN_RETRY_AFTER_S, self.expected_wait_s(victim.flow, victim.item.query))
        victim.item.on_shed = OverloadedError(
            f"{self._config.max_queued_requests} requests are waiting already", retry_after_s=retry_after_s
        )
        return victim.item

    def check_deadline(self, query: RouteQuery, give_up_s: float, now_s: float) -> None:
        """Raises OverloadedError at once when the queue is known to be too long for the request's deadline."""
        wait_s = self.expected_wait_s(query.tenant_hash, query)
        if now_s + wait_s > give_up_s:
            raise OverloadedError(
                f"the expected wait of {wait_s:.1f} s exceeds the request's time limit",
                retry_after_s=max(MIN_RETRY_AFTER_S, wait_s),
            )

    def expected_wait_s(self, flow: object, query: RouteQuery) -> float:
        """0 while nothing waits or the service rate is unknown."""
        if not len(self.queue) or self._service_tokens_per_s <= 0.0:
            return 0.0
        weight = self._limits_of(query.tenant_hash).weight
        own_share = self.queue.share_of(query.tenant_hash, weight)
        ahead = min(self.queue.queued_cost(), self.queue.queued_cost(query.tenant_hash) / own_share)
        return ahead / self._service_tokens_per_s

    def spare_seqs(self, num_held: int, num_places: int, now_s: float) -> int:
        """How many requests a worker may hold beyond its sequences, the next one of this tenant included.

        Negative: so many places are kept from the tenant, because it holds its share, `num_held` of the cluster's
        `num_places`, while others are active. One that holds less may use the places kept from the rest.
        """
        config = self._config
        if not num_held or not config.reserved_seqs_per_worker:
            return config.extra_seqs_per_worker
        num_active = self.num_active_tenants(now_s, most=num_places // num_held + 2)
        if num_active < 2:
            return config.extra_seqs_per_worker
        # No extra ones either way: they would only queue in front of the kept place's owner.
        return config.extra_seqs_per_worker if num_held * num_active < num_places else -config.reserved_seqs_per_worker

    def serve(
        self, place: Callable[[RouteQuery], Placed | None], now_s: float
    ) -> Iterator[tuple[Entry[Waiting], Placed]]:
        """Has `place` put waiting requests somewhere, fairest first, until it says None to all that could be next."""
        is_progressing = len(self.queue) > 0
        while is_progressing:
            is_progressing = False
            for entry in self.queue.heads():
                placed = place(entry.item.query)
                if placed is None:
                    continue  # no room among *its* candidates; another tenant's may have some
                self.served(entry, now_s)
                yield entry, placed
                is_progressing = len(self.queue) > 0
                break

    def served(self, entry: Entry[Waiting], now_s: float) -> None:
        """`entry` was placed."""
        self.queue.serve(entry)
        if not len(self.queue):
            self._last_served_s = None
            return
        if self._last_served_s is not None and now_s > self._last_served_s:
            rate = entry.cost / (now_s - self._last_served_s)
            smoothing = 0.1 if self._service_tokens_per_s else 1.0
            self._service_tokens_per_s += smoothing * (rate - self._service_tokens_per_s)
        self._last_served_s = now_s

    def num_active_tenants(self, now_s: float, most: int) -> int:
        """Counted up to `most`."""
        active = 0
        for tenant in reversed(self._tenants.values()):
            if now_s - tenant.last_seen_s > self._config.active_window_s or active >= most:
                break
            active += 1
        return active

    def _limits_of(self, tenant_hash: bytes) -> TenantLimits:
        return self._limits.get(tenant_hash, self._config.default_limits)

    def _tenant(self, tenant_hash: bytes, now_s: float) -> _Tenant:
        tenant = self._tenants.get(tenant_hash)
        if tenant is None:
            limits = self._limits_of(tenant_hash)
            tenant = self._tenants[tenant_hash] = _Tenant(limits, RateLimit(limits, now_s), now_s)
            while len(self._tenants) > self._config.max_tenants:
                self._tenants.popitem(last=False)
            self.queue.forget_idle()
        tenant.last_seen_s = now_s
        self._tenants.move_to_end(tenant_hash)
        return tenant
