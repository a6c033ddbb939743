"""Calls to all workers at once, outside the token streams: warm-ups, unpinning, purges."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any, Protocol

import grpc

from cluster.api.channel import METHOD_CONTROL, ControlCall
from cluster.api.errors import UnavailableError
from cluster.api.stream import pass_of
from cluster.api.worker_state import WorkerInfo

CALL_TIMEOUT_S = 60.0


class Members(Protocol):
    @property
    def members(self) -> tuple[WorkerInfo, ...]: ...


class WorkerControlClient(Protocol):
    """A way to call one worker; the answer is what cluster/api/channel.py says of the call."""

    async def call(self, worker: WorkerInfo, call: ControlCall) -> Any:
        """Raises UnavailableError when the worker cannot be reached or refuses."""
        ...


class ControlCalls(Members, WorkerControlClient, Protocol):
    """All workers, and a way to call each."""


class ControlClient:
    """One connection a call: control calls are rare."""

    def __init__(self, router: Members, token: str) -> None:
        self._router = router
        self._token = token

    @property
    def members(self) -> tuple[WorkerInfo, ...]:
        """All workers, also those that take no work yet."""
        return self._router.members

    async def call(self, worker: WorkerInfo, call: ControlCall) -> Any:
        """The worker's answer. Raises UnavailableError when it cannot be reached or refuses."""
        metadata = pass_of(self._token, worker.epoch)
        async with grpc.aio.insecure_channel(worker.replica_id) as channel:
            method = channel.unary_unary(METHOD_CONTROL, request_serializer=pickle.dumps)
            try:
                answer = pickle.loads(await method(call, metadata=metadata, timeout=CALL_TIMEOUT_S))
            except grpc.aio.AioRpcError:
                raise UnavailableError(f"{worker.worker_id} did not carry out a control call") from None
        return answer

    async def call_all(self, call: ControlCall) -> int:
        """Sum of all answers. Raises UnavailableError when one worker fails: the caller may ask again."""
        answers = await asyncio.gather(*(self.call(worker, call) for worker in self.members))
        return sum(answers)
