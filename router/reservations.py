"""Which request holds a place on which worker. All synchronous: nothing comes between choice and reservation."""

from __future__ import annotations

from collections import Counter, deque

from cluster.api.ids import RequestId
from cluster.api.worker_state import WorkerSnapshot
from router.worker_load import Reservation, WorkerLoad

_REMEMBER_RELEASED_S = 5.0  # longer than a snapshot can be on its way


class Reservations:
    """Idempotent by request id. A place has two parts: the prefill, given back at the first token, and the sequence."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._by_request: dict[RequestId, Reservation] = {}
        self._per_tenant: Counter[bytes] = Counter()
        self._released: dict[RequestId, float] = {}
        self._release_order: deque[tuple[float, RequestId]] = deque()

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request_id: RequestId) -> Reservation | None:
        return self._by_request.get(request_id)

    def num_running_of(self, tenant_hash: bytes) -> int:
        return self._per_tenant[tenant_hash]

    def reserve(self, reservation: Reservation) -> None:
        """Takes the place. An earlier one of the same request is given back first, so none can be held twice."""
        self.release(reservation.request_id, reservation.created_s)
        self._by_request[reservation.request_id] = reservation
        self._per_tenant[reservation.tenant_hash] += 1
        reservation.load.add(reservation)

    def first_token(self, request_id: RequestId, now_s: float) -> Reservation | None:
        """Gives the prefill part back. None when there is no such reservation or the first token was told before."""
        reservation = self._by_request.get(request_id)
        if reservation is None or reservation.first_token_s is not None:
            return None
        reservation.first_token_s = now_s
        reservation.load.end_prefill(request_id, now_s)
        return reservation

    def release(self, request_id: RequestId, now_s: float) -> Reservation | None:
        """Gives the place back; None when it is not held (any more)."""
        reservation = self._by_request.pop(request_id, None)
        if reservation is None:
            return None
        reservation.load.remove(request_id, now_s)
        self._per_tenant[reservation.tenant_hash] -= 1
        if not self._per_tenant[reservation.tenant_hash]:
            del self._per_tenant[reservation.tenant_hash]
        self._remember(request_id, now_s)
        return reservation

    def release_all(self, load: WorkerLoad, now_s: float) -> int:
        """The worker's life is over; returns how many places it took with it."""
        request_ids = list(load.reservations)
        for request_id in request_ids:
            self.release(request_id, now_s)
        return len(request_ids)

    def heal(self, load: WorkerLoad, snapshot: WorkerSnapshot, now_s: float) -> int:
        """Corrects the worker's counters by its own report; returns how many leaked places were given back.

        A place is leaked when the engine does not know its request and it is too old to be still on its way there.
        """
        alive = frozenset(snapshot.request_ids)
        leaked = [
            request_id
            for request_id, reservation in load.reservations.items()
            if request_id not in alive and now_s - reservation.created_s > self._grace_s
        ]
        for request_id in leaked:
            self.release(request_id, now_s)
        self._forget_released(now_s)
        # A request released after the snapshot was taken is not another router's.
        foreign = sum(1 for r in alive if r not in load.reservations and r not in self._released)
        load.heal(snapshot.pending_prefill_tokens, alive, foreign, now_s)
        return len(leaked)

    def check_integrity(self) -> None:
        for request_id, reservation in self._by_request.items():
            assert reservation.load.reservations[request_id] is reservation
        assert sum(self._per_tenant.values()) == len(self._by_request)

    def _remember(self, request_id: RequestId, now_s: float) -> None:
        self._forget_released(now_s)
        self._released[request_id] = now_s
        self._release_order.append((now_s, request_id))

    def _forget_released(self, now_s: float) -> None:
        while self._release_order and now_s - self._release_order[0][0] > _REMEMBER_RELEASED_S:
            released_s, request_id = self._release_order.popleft()
            if self._released.get(request_id) == released_s:
                del self._released[request_id]
