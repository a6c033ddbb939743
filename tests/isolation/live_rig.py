"""A real worker and a real gateway in one process: engine thread, token streams, control channel, HTTP app. No Ray."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from cache_service.block_key import BlockKeyer
from cluster.api.ids import RequestId, WorkerId
from cluster.api.output import RequestOutput
from cluster.api.principal import Role
from cluster.api.request import Request
from cluster.api.worker_state import WorkerInfo, WorkerSnapshot
from cluster.auth.authenticator import Authenticator
from cluster.auth.key_store import create_key
from cluster.backend import ModelInfo
from cluster.cluster_metrics import ClusterCollector
from cluster.control_client import ControlClient
from cluster.dispatch import Dispatcher, WorkerPool
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.targets.weights import LoadedModel
from cluster.http.config import HttpConfig
from cluster.http.inspection_routes import InspectionRoutes
from cluster.http_app import build_http_app
from cluster.inspection import Inspector
from cluster.metrics import GatewayMetrics
from cluster.sentinel.metrics import SentinelMetrics
from cluster.sentinel.pinned import PinnedRouter
from cluster.sentinel.probe import MarkerProbe
from cluster.sentinel.sentinel import Sentinel
from cluster.serving.core import ServedModel, ServingCore
from cluster.worker_client import WorkerClient
from router.stats import Counters, RouterStats, WorkerStats
from workers.async_engine import AsyncLLMEngine
from workers.build import build_engine
from workers.channel import WorkerChannel
from workers.config import EngineConfig
from workers.control import WorkerControl
from workers.counters import engine_counters
from workers.engine import LLMEngine

SECRET = b"a secret of at least thirty-two bytes"
TOKEN = "token"
EPOCH = "e1"
CONFIG = EngineConfig(num_blocks=512, max_model_len=1024, max_num_seqs=8)


class Meeting:
    """Stands before an engine: what a probe sends as company waits until all of it is there, and enters one step.

    Else it would be for the machine to say whether the first has ended before the last comes. What runs alone, and has
    a salt of its own for it, goes through.
    """

    def __init__(self, engine: AsyncLLMEngine, size: Callable[[LLMEngine], int]) -> None:
        self._engine = engine
        self._size = size
        self._waiting: list[Request] = []  # touched on the engine's thread alone

    def submit(self, request: Request) -> None:
        if request.spans[-1].fields.salt is None:
            self._engine.call(lambda engine: self._let_in(engine, request))
        else:
            self._engine.submit(request)

    def _let_in(self, engine: LLMEngine, request: Request) -> None:
        self._waiting.append(request)
        if len(self._waiting) == self._size(engine):
            for each in self._waiting:
                engine.add_request(each)
            self._waiting.clear()

    def abort(self, request_id: RequestId) -> None:
        self._engine.abort(request_id)


class LiveWorker:
    """What workers/actor.py puts together, without Ray. `company`: how many requests of a probe meet, see `Meeting`."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, parts: StackParts, company: Callable[[LLMEngine], int] | None
    ) -> None:
        runner = loaded.make_runner(config, parts.wrap_model)
        self.keyer = parts.keyer(SECRET, runner.identity)
        self.llm_engine = build_engine(config, runner, self.keyer, parts.engine)
        self.engine = AsyncLLMEngine(self.llm_engine, self._on_outputs)
        self.control = WorkerControl(self.engine, self.keyer)
        door = self.engine if company is None else Meeting(self.engine, company)
        self.channel = WorkerChannel(door, self.control, TOKEN, EPOCH, "127.0.0.1")
        self._loaded, self._config, self._runner = loaded, config, runner

    async def start(self) -> WorkerInfo:
        address = await self.channel.start()
        self.engine.start()
        identity = self._runner.identity
        return WorkerInfo(
            worker_id=WorkerId("worker-0"),
            epoch=EPOCH,
            replica_id=address,
            model=self._loaded.name,
            numerics=self._runner.numerics,
            block_size_tokens=self._config.block_size,
            num_blocks=self._config.num_blocks,
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=self._config.max_model_len,
            weights_digest=identity.weights_digest,
            dtype=identity.dtype,
            kv_layout=identity.kv_layout,
            vocab_size=self._runner.vocab_size,
            eos_token_ids=self._runner.eos_token_ids,
        )

    async def stop(self) -> None:
        await self.channel.stop(0.1)
        await asyncio.to_thread(self.engine.stop, 1.0)

    def _on_outputs(self, outputs: list[RequestOutput]) -> None:
        self.channel.on_outputs(self.control.take(outputs))


@dataclass
class OneWorkerRouter:
    """Knows one worker; its index says what the worker holds, and what else it was told to believe."""

    info: WorkerInfo
    worker: LiveWorker
    stale: set[bytes] = field(default_factory=set)

    @property
    def members(self) -> tuple[WorkerInfo, ...]:
        return (self.info,)

    @property
    def live_workers(self) -> tuple[WorkerInfo, ...]:
        return (self.info,) if self.worker.llm_engine.is_healthy else ()

    async def indexed(self) -> Mapping[WorkerId, frozenset[bytes]]:
        keys = await asyncio.wrap_future(self.worker.engine.call(lambda engine: engine.cached_keys()))
        return {self.info.worker_id: frozenset(key[:8] for key in keys) | self.stale}


class Live:
    """Both ends. `gateway_keyer` may differ from the worker's, as a broken derivation would."""

    def __init__(self, loaded: LoadedModel, worker: LiveWorker, info: WorkerInfo, gateway_keyer: BlockKeyer) -> None:
        self.worker, self.info = worker, info
        self.router = OneWorkerRouter(info, worker)
        self.pool = WorkerPool(lambda address, epoch: WorkerClient(address, TOKEN, epoch))
        self.control = ControlClient(self.router, TOKEN)
        model_info = ModelInfo(loaded.name, info.max_model_len, info.vocab_size, info.eos_token_ids)
        self.model = ServedModel(model_info, loaded.prompts, loaded.tokens, gateway_keyer)
        self.metrics = GatewayMetrics()
        backend = Dispatcher(PinnedRouter(info), self.pool)
        self.core = ServingCore([self.model], backend, observer=self.metrics.generation)
        self.probe = MarkerProbe(self.model, self.pool, self.control)
        self.sentinel_metrics = SentinelMetrics(self.metrics.registry)
        self.sentinel = Sentinel(
            self.probe, self.control, self.sentinel_metrics, lambda: self.router.live_workers, period_s=60.0
        )
        collector = ClusterCollector()
        self.metrics.registry.register(collector)

        async def refresh() -> None:
            collector.stats = await self._stats()

        self.metrics.refresh = refresh

    async def _stats(self) -> RouterStats:
        """As the router would have it from the worker's last heartbeat."""
        load, counted = await asyncio.wrap_future(
            self.worker.engine.call(lambda engine: (engine.load(), engine_counters(engine)))
        )
        snapshot = WorkerSnapshot(
            self.info.worker_id,
            EPOCH,
            load.num_running,
            load.num_waiting,
            load.pending_prefill_tokens,
            load.num_free_blocks,
            load.prefill_tokens_per_s,
            load.decode_step_s,
            load.request_ids,
            is_healthy=load.is_healthy,
            counters=counted,
        )
        stats = WorkerStats(self.info.worker_id, EPOCH, load.is_healthy, False, False, 0, 0, 0.0, 0.0, 0.0, snapshot)
        return RouterStats(Counters(), 0, 0, (stats,))

    def inspector(self, authenticator: Authenticator, *, has_sentinel: bool = True) -> Inspector:
        sentinel = self.sentinel if has_sentinel else None
        # Nothing is on its way to an index that is asked of the worker itself.
        return Inspector(self.router, self.control, self.model.keyer, authenticator, sentinel, index_patience_s=0.0)


@asynccontextmanager
async def live(
    loaded: LoadedModel,
    config: EngineConfig = CONFIG,
    parts: StackParts | None = None,
    gateway_keyer: type[BlockKeyer] = BlockKeyer,
    company: Callable[[LLMEngine], int] | None = None,
) -> AsyncIterator[Live]:
    worker = LiveWorker(loaded, config, parts or StackParts(), company)
    info = await worker.start()
    both = Live(loaded, worker, info, gateway_keyer(SECRET, worker.keyer.model))
    try:
        yield both
    finally:
        await both.pool.close()
        await worker.stop()


@dataclass(frozen=True)
class Served:
    url: str
    operator_key: str


@asynccontextmanager
async def served(
    both: Live, folder: Path, *, has_keys: bool = True, has_sentinel: bool = True
) -> AsyncIterator[Served]:
    """The HTTP front door on a port of its own."""
    keys_path = folder / "keys.json"
    key = create_key(keys_path, "acme", roles=frozenset({Role.OPERATOR}))[1] if has_keys else ""
    authenticator = Authenticator(keys_path, allow_anonymous=True)
    routes = InspectionRoutes(both.inspector(authenticator, has_sentinel=has_sentinel)).routes()
    app = build_http_app(both.core, authenticator, both.metrics, HttpConfig(), extra_routes=routes)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    server.install_signal_handlers = lambda: None  # type: ignore[method-assign]  # the process is pytest's
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", key)
    finally:
        server.should_exit = True
        await serving


def counters(both: Live) -> dict[str, int]:
    return dict(both.worker.engine.call(engine_counters).result())
