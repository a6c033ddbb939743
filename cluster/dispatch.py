"""Dispatcher: places a request, carries its outputs, and moves it to another worker when one is lost.

Before the first token a lost worker is simply left out. After it, the request goes on where it stopped, on a worker
with the same numerics: bit-exact engines and counter-based noise make the continuation identical, so the caller sees
one uninterrupted stream. Knows nothing of Ray: the router and the connections stand behind protocols.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.api.errors import UnavailableError, WatchwordError, WorkerLostError
from cluster.api.ids import RequestId, WorkerId
from cluster.api.output import ChoiceDelta, RequestOutput
from cluster.api.request import Request
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.backend import Placement

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4


class RouterClient(Protocol):
    """The router as a gateway sees it. Only `route` is waited for."""

    async def route(self, query: RouteQuery) -> RouteDecision: ...
    def first_token(self, request_id: RequestId, worker_id: WorkerId) -> None: ...
    def release(self, request_id: RequestId, worker_id: WorkerId) -> None: ...
    def worker_failed(self, worker_id: WorkerId, epoch: str) -> None: ...
    async def is_ready(self) -> bool: ...


class TokenStreams(Protocol):
    """A connection to one life of a worker; cluster/worker_client.py is the real one."""

    @property
    def is_lost(self) -> bool: ...

    def stream(self, request: Request, on_finished: Callable[[], None]) -> AsyncGenerator[RequestOutput, None]: ...
    async def close(self) -> None: ...


class WorkerPool:
    """Connections by worker epoch, made on first use and dropped when lost."""

    def __init__(self, connect: Callable[[str, str], TokenStreams]) -> None:
        self._connect = connect  # (address, epoch) -> client
        self._clients: dict[str, TokenStreams] = {}

    def get(self, decision: RouteDecision) -> TokenStreams:
        self._clients = {epoch: client for epoch, client in self._clients.items() if not client.is_lost}
        client = self._clients.get(decision.epoch)
        if client is None:
            client = self._clients[decision.epoch] = self._connect(decision.replica_id, decision.epoch)
        return client

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()


@dataclass(slots=True)
class _Progress:
    """What the caller has received of each choice: what a resumption starts from."""

    emitted: list[list[int]]
    done: set[int] = field(default_factory=set)
    has_started: bool = False
    numerics: str | None = None
    tried: list[WorkerId] = field(default_factory=list)

    def record(self, output: RequestOutput) -> None:
        for delta in output.deltas:
            self.emitted[delta.index].extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.done.add(delta.index)
        self.has_started = self.has_started or bool(output.deltas)


class Dispatcher:
    """Implements cluster.backend.Backend over a router and worker connections."""

    def __init__(self, router: RouterClient, pool: WorkerPool) -> None:
        self._router = router
        self._pool = pool

    async def is_ready(self) -> bool:
        return await self._router.is_ready()

    async def generate(
        self, request: Request, *, affinity_key: str | None = None, placement: Placement | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        placement = placement if placement is not None else Placement()
        progress = _Progress([[] for _ in range(request.sampling.n)])
        for attempt in range(MAX_ATTEMPTS):
            decision = await self._place(request, progress, affinity_key)
            placement.worker_id = decision.worker_id
            placement.num_resumes = attempt if progress.has_started else 0
            try:
                async with aclosing(self._attempt(request, decision, progress)) as outputs:
                    async for output in outputs:
                        yield output
                return
            except WorkerLostError:
                logger.warning("worker %s lost while it ran request %s", decision.worker_id, request.request_id)
                self._router.worker_failed(decision.worker_id, decision.epoch)
                progress.tried.append(decision.worker_id)
        raise WorkerLostError(f"{MAX_ATTEMPTS} workers were lost while they ran this request")

    async def _place(self, request: Request, progress: _Progress, affinity_key: str | None) -> RouteDecision:
        query = RouteQuery(
            request_id=request.request_id,
            model=request.model,
            block_keys=request.block_keys,
            num_prompt_tokens=request.num_prompt_tokens + sum(map(len, progress.emitted)),
            max_tokens=request.sampling.max_tokens,
            tenant_hash=request.tenant_hash,
            user_hash=request.user_hash,
            affinity_key=affinity_key,
            deadline_unix_s=request.deadline_unix_s,
            excluded=tuple(progress.tried),
            numerics=progress.numerics if progress.has_started else None,
        )
        try:
            return await self._router.route(query)
        except UnavailableError:
            if progress.has_started:
                raise WorkerLostError("the worker was lost and no equal one is there to go on") from None
            raise

    async def _attempt(
        self, request: Request, decision: RouteDecision, progress: _Progress
    ) -> AsyncGenerator[RequestOutput, None]:
        """One worker's part of the stream. The reservation is given back however this ends."""
        if not progress.has_started:
            progress.numerics = decision.numerics
        else:
            request = replace(request, emitted=tuple(tuple(tokens) for tokens in progress.emitted))
        is_resumed, saw_token = progress.has_started, False

        def release() -> None:
            # Named with its worker: told late, it must not take the place of the attempt that came after.
            self._router.release(request.request_id, decision.worker_id)

        try:
            async with aclosing(self._pool.get(decision).stream(request, release)) as stream:
                async for output in stream:
                    if output.error is not None:
                        raise _as_seen_from_here(output.error)
                    if output.deltas and not saw_token:
                        saw_token = True
                        self._router.first_token(request.request_id, decision.worker_id)
                    if is_resumed:
                        output = _without_repeats(output, progress)
                    progress.record(output)
                    yield output
        finally:
            release()


def _as_seen_from_here(error: WatchwordError) -> WatchwordError:
    """A worker that is shutting down or damaged is lost to the request, which may go on elsewhere."""
    return WorkerLostError(error.message) if isinstance(error, UnavailableError) else error


def _without_repeats(output: RequestOutput, progress: _Progress) -> RequestOutput:
    """A resumed stream reports the cache of its second prefill and the ends of choices the caller knows to be over."""
    deltas: tuple[ChoiceDelta, ...] = tuple(delta for delta in output.deltas if delta.index not in progress.done)
    return replace(output, deltas=deltas, num_cached_tokens=None)
