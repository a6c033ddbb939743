"""Where a session was served last. A wish for the policy; it never decides what is shared."""

from __future__ import annotations

from collections import OrderedDict

from cluster.api.ids import WorkerId


class Affinity:
    """Bounded in number and age; keys are opaque and scoped by tenant, so that two tenants' sessions never meet."""

    def __init__(self, ttl_s: float, max_keys: int) -> None:
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._workers: OrderedDict[tuple[bytes, str], tuple[WorkerId, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def worker_of(self, tenant_hash: bytes, key: str | None, now_s: float) -> WorkerId | None:
        if key is None:
            return None
        entry = self._workers.get((tenant_hash, key))
        if entry is None or now_s - entry[1] > self._ttl_s:
            return None
        return entry[0]

    def remember(self, tenant_hash: bytes, key: str | None, worker_id: WorkerId, now_s: float) -> None:
        if key is None or self._max_keys == 0:
            return
        self._workers[tenant_hash, key] = (worker_id, now_s)
        self._workers.move_to_end((tenant_hash, key))
        while len(self._workers) > self._max_keys:
            self._workers.popitem(last=False)
