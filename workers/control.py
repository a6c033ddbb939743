"""What gateways may ask of a worker besides tokens: warm-ups, purges, evidence, quarantine.

Warm-ups run through the engine like any request; their outputs are taken out of the stream here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import reduce
from operator import xor
from typing import TypeVar

from cache_service.block_key import BlockKeyer
from cluster.api.channel import (
    AuditCache,
    AuditLayout,
    ControlCall,
    Inspect,
    KeepPins,
    LoadAdapter,
    PurgeUser,
    Quarantine,
    SetMaxNumSeqs,
    Trace,
    UnloadAdapter,
    WarmUp,
)
from cluster.api.errors import UnavailableError
from cluster.api.ids import BlockKey, RequestId
from cluster.api.output import RequestOutput
from cluster.api.request import Request
from workers.adapter_loader import AdapterLoader
from workers.async_engine import AsyncLLMEngine
from workers.engine import LLMEngine
from workers.evidence import inspect, trace
from workers.layout_audit import audit_layout

T = TypeVar("T")


class WorkerControl:
    """Lives on the worker's event loop; `take` is called on the engine's step thread."""

    def __init__(
        self,
        engine: AsyncLLMEngine,
        keyer: BlockKeyer,
        on_warm: Callable[[], None] = lambda: None,
        on_quarantine: Callable[[], None] = lambda: None,
        adapters: AdapterLoader | None = None,
    ) -> None:
        self._engine = engine
        self._keyer = keyer
        self._on_warm = on_warm
        self._on_quarantine = on_quarantine
        self._adapters = adapters
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[RequestId, asyncio.Future[RequestOutput]] = {}

    async def __call__(self, call: ControlCall) -> object:
        match call:
            case WarmUp(requests, is_complete):
                num_pinned = sum([await self._warm_up(request) for request in requests])
                if is_complete:
                    self._on_warm()
                return num_pinned
            case KeepPins(keys):
                return await self._on_engine(lambda engine: engine.keep_pins(keys))
            case PurgeUser(user_hash):
                return await self._on_engine(lambda engine: engine.purge_user(user_hash))
            case AuditCache():
                return _digest(await self._on_engine(lambda engine: engine.cached_keys()))
            case Quarantine(reason):
                return await self._quarantine(reason)
            case SetMaxNumSeqs(max_num_seqs):
                await self._on_engine(lambda engine: engine.set_max_num_seqs(max_num_seqs))
                return max_num_seqs
            case Trace(request_ids):
                records = await self._on_engine(lambda engine: tuple(engine.event_log))
                return await asyncio.to_thread(trace, records, frozenset(request_ids))
            case Inspect():
                return await self._on_engine(lambda engine: inspect(engine, self._keyer))
            case AuditLayout():
                return await self._on_engine(audit_layout)
            case LoadAdapter():
                return await self._adapters.load(call) if self._adapters is not None else "there are no adapters here"
            case UnloadAdapter():
                return await self._adapters.unload(call) if self._adapters is not None else 0

    async def _quarantine(self, reason: str) -> int:
        is_new = await self._on_engine(lambda engine: engine.quarantine(reason))
        self._on_quarantine()
        return int(is_new)

    async def _on_engine(self, function: Callable[[LLMEngine], T]) -> T:
        return await asyncio.wrap_future(self._engine.call(function))

    def take(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Keeps the outputs of warm-ups and returns the others."""
        if not self._waiting:
            return outputs
        rest = []
        for output in outputs:
            future = self._waiting.get(output.request_id)
            if future is None:
                rest.append(output)
            elif output.finished:
                self._loop.call_soon_threadsafe(_finish, future, output)
        return rest

    async def _warm_up(self, request: Request) -> int:
        """Blocks of the prompt that are pinned afterwards."""
        future: asyncio.Future[RequestOutput] = self._loop.create_future()
        self._waiting[request.request_id] = future
        try:
            self._engine.submit(request, is_warm_up=True)
            output = await future
        finally:
            del self._waiting[request.request_id]
        if output.error is not None:
            raise UnavailableError(f"warm-up failed: {output.error.message}")
        keys = request.block_keys
        return await asyncio.wrap_future(self._engine.call(lambda engine: engine.pool.count_pinned(keys)))


def _digest(keys: Collection[BlockKey]) -> int:
    combined = reduce(xor, (int.from_bytes(key[:8], "little") for key in keys), 0)
    return len(keys) << 64 | combined


def _finish(future: asyncio.Future[RequestOutput], output: RequestOutput) -> None:
    if not future.done():
        future.set_result(output)
