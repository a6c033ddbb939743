"""The router's own admission in front of a simulated cluster: who waits, in which order, and who is refused."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from cluster.api.errors import OverloadedError, RateLimitedError
from cluster.api.ids import RequestId
from cluster.api.routing import RouteQuery
from router.admission import Admission, Waiting
from router.config import AdmissionConfig
from router.fair_queue import Entry
from router.simulate.trace import TraceRequest


class Turn(NamedTuple):
    """A waiting request that may be placed at `now_s`, on workers with fewer than `most_seqs` requests."""

    number: int
    request: TraceRequest
    now_s: float
    most_seqs: int


Place = Callable[[Turn], bool]
"""Puts the request on a worker; False when none has room for it."""


class FrontQueue:
    """Does what `Router.route` does around a placement, with the clock of the simulation instead of an event loop's."""

    def __init__(self, config: AdmissionConfig, num_workers: int, max_num_seqs: int, place: Place) -> None:
        self._config = config
        self._max_num_seqs = max_num_seqs
        self._num_places = num_workers * max_num_seqs
        self._place = place
        self._admission = Admission(config)
        self._requests: dict[RequestId, tuple[int, TraceRequest]] = {}  # of those that wait
        self._expiries: deque[Entry[Waiting]] = deque()  # in order of arrival, which is that of their time limits
        self._num_running: Counter[bytes] = Counter()

    def arrive(self, number: int, request: TraceRequest, now_s: float) -> None:
        """Placed at once, queued, or refused: in all cases the caller learns it from `place`, or from its absence."""
        self._expire(now_s)
        query = _query(number, request)
        give_up_s = now_s + self._config.max_queue_wait_s
        try:
            self._admission.check_rate(query, now_s)
            self._admission.check_deadline(query, give_up_s, now_s)
        except (RateLimitedError, OverloadedError):
            return
        self._requests[query.request_id] = (number, request)
        self._expiries.append(self._admission.enqueue(Waiting(query, give_up_s), is_retry=False, now_s=now_s))
        self._serve(now_s)
        victim = self._admission.make_room()
        if victim is not None:
            del self._requests[victim.query.request_id]

    def end(self, request: TraceRequest, now_s: float) -> None:
        """A placed request has all its output: somebody may take its place."""
        self._num_running[_hash_of(request.tenant)] -= 1
        self._expire(now_s)
        self._serve(now_s)

    def _serve(self, now_s: float) -> None:
        def place(query: RouteQuery) -> RouteQuery | None:
            spare = self._admission.spare_seqs(self._num_running[query.tenant_hash], self._num_places, now_s)
            most_seqs = max(1, self._max_num_seqs + spare)
            turn = Turn(*self._requests[query.request_id], now_s, most_seqs)
            return query if self._place(turn) else None

        for _, query in self._admission.serve(place, now_s):
            self._num_running[query.tenant_hash] += 1
            del self._requests[query.request_id]

    def _expire(self, now_s: float) -> None:
        while self._expiries and self._expiries[0].item.give_up_s <= now_s:
            entry = self._expiries.popleft()
            if self._admission.queue.remove(entry):
                del self._requests[entry.item.query.request_id]


def _query(number: int, request: TraceRequest) -> RouteQuery:
    tenant_hash = _hash_of(request.tenant)
    return RouteQuery(
        RequestId(str(number)), "", (), request.num_prompt_tokens, request.num_output_tokens, tenant_hash, tenant_hash
    )


def _hash_of(tenant: int) -> bytes:
    return tenant.to_bytes(4, "big")
