"""What a running cluster shows of itself: traces of requests, and the evidence behind `watchword check`.

Everything is asked now, of the live parts; nothing is remembered from the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from operator import xor
from typing import Any, Protocol

from cache_service.block_key import BlockKeyer
from cache_service.key_audit import fixed_chain_digest, missing_fields
from cluster.api.channel import AuditCache, AuditLayout, Inspect, Trace
from cluster.api.errors import NotFoundError, WatchwordError
from cluster.api.evidence import LayoutEvidence, TracedEvent, WorkerEvidence
from cluster.api.ids import RequestId, WorkerId
from cluster.api.worker_state import WorkerInfo
from cluster.auth.authenticator import Authenticator
from cluster.control_client import Members, WorkerControlClient
from cluster.sentinel.sentinel import Sentinel

INDEX_PATIENCE_S = 5.0  # block events are on their way for a moment


class IndexedMembers(Members, Protocol):
    """The router as far as an inspection needs it."""

    async def indexed(self) -> Mapping[WorkerId, frozenset[bytes]] | None: ...


@dataclass(frozen=True, slots=True)
class Inspector:
    """`sentinel` None: switched off."""

    router: IndexedMembers
    control: WorkerControlClient
    keyer: BlockKeyer
    authenticator: Authenticator
    sentinel: Sentinel | None
    index_patience_s: float = INDEX_PATIENCE_S

    async def trace(self, request_id: RequestId) -> dict[str, Any]:
        """Raises NotFoundError when no worker remembers the request."""
        for worker in self.router.members:
            try:
                events: tuple[TracedEvent, ...] = await self.control.call(worker, Trace((request_id,)))
            except WatchwordError:
                continue  # a worker that is gone remembers nothing
            if events:
                return _trace_body(request_id, worker, events)
        raise NotFoundError("no worker's event log names this request", code="request_not_found")

    async def evidence(self) -> dict[str, Any]:
        """One record for the gateway, one for every worker that is known."""
        workers = await asyncio.gather(*(self._worker(worker) for worker in self.router.members))
        return {
            "object": "evidence",
            "gateway": {
                "fields_missing_in_key": list(missing_fields(self.keyer)),
                "key_digest": fixed_chain_digest(self.keyer).hex(),
                "lets_anyone_in": self.authenticator.is_open,
                "sentinel_period_s": None if self.sentinel is None else self.sentinel.period_s,
            },
            "workers": workers,
        }

    async def _worker(self, worker: WorkerInfo) -> dict[str, Any]:
        head = {"worker": worker.worker_id, "epoch": worker.epoch, "numerics": worker.numerics}
        try:
            facts: WorkerEvidence = await self.control.call(worker, Inspect())
            layout: LayoutEvidence = await self.control.call(worker, AuditLayout())
            index = await self._index(worker)
        except WatchwordError as error:
            return head | {"unreachable": error.message}
        books = asdict(facts) | {"key_digest": facts.key_digest.hex()}
        books["settings"], books["counters"] = dict(facts.settings), dict(facts.counters)
        return head | {"books": books, "layout": asdict(layout), "index": index}

    async def _index(self, worker: WorkerInfo) -> dict[str, Any]:
        """Blocks the worker holds, blocks the router believes it holds, and whether they are the same ones."""
        deadline = asyncio.get_running_loop().time() + self.index_patience_s
        while True:
            indexed = await self.router.indexed()
            held = await self.control.call(worker, AuditCache())
            believed = None if indexed is None else _digest(indexed.get(worker.worker_id, frozenset()))
            if believed in (None, held) or asyncio.get_running_loop().time() > deadline:
                num_believed = None if believed is None else believed >> 64
                return {"num_held": held >> 64, "num_believed": num_believed, "is_equal": believed == held}
            await asyncio.sleep(0.2)


def _trace_body(request_id: RequestId, worker: WorkerInfo, events: tuple[TracedEvent, ...]) -> dict[str, Any]:
    users = {event.request: event.user for event in events if event.request is not None and event.action == "allocate"}
    return {
        "object": "request.trace",
        "request": request_id,
        "worker": worker.worker_id,
        "epoch": worker.epoch,
        "users": users,
        "events": [asdict(event) for event in events],
    }


def _digest(prints: frozenset[bytes]) -> int:
    """As a worker answers AuditCache."""
    return len(prints) << 64 | reduce(xor, (int.from_bytes(each, "little") for each in prints), 0)
