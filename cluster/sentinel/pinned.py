"""A way to one worker and no other, over the gateway's own connections: no tenant's queue, limit or figure sees it."""

from __future__ import annotations

from cluster.api.errors import UnavailableError
from cluster.api.ids import RequestId, WorkerId
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.worker_state import WorkerInfo


class PinnedRouter:
    """A RouterClient that always decides for the same life of the same worker."""

    def __init__(self, worker: WorkerInfo) -> None:
        self._worker = worker

    async def route(self, query: RouteQuery) -> RouteDecision:
        """Raises UnavailableError once the worker was lost or refused."""
        worker = self._worker
        if worker.worker_id in query.excluded:
            raise UnavailableError(f"{worker.worker_id} does not take the probe")
        return RouteDecision(worker.worker_id, worker.epoch, worker.replica_id, worker.numerics, num_matched_blocks=0)

    def first_token(self, request_id: RequestId, worker_id: WorkerId) -> None: ...

    def release(self, request_id: RequestId, worker_id: WorkerId) -> None: ...

    def worker_failed(self, worker_id: WorkerId, epoch: str) -> None: ...

    async def is_ready(self) -> bool:
        return True
