"""A worker as a Ray Serve replica: engine, token streams, heartbeats, block events. Decides nothing.

Serve places, health-checks and replaces it; tokens do not pass through Serve (see workers/channel.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve

from cache_service.block_key import BlockKeyer
from cache_service.events import BlockEvent, EventBatch, Snapshot
from cache_service.index_publisher import IndexPublisher
from cache_service.redis_index import IndexSettings
from cluster.api.drain_notice import DrainNotice
from cluster.api.ids import WorkerId, new_epoch
from cluster.api.output import RequestOutput
from cluster.api.precedence import thread_ids, yield_to_engines
from cluster.api.secret import channel_token
from cluster.api.worker_state import WorkerInfo, WorkerSnapshot
from workers.adapter_loader import AdapterLoader
from workers.async_engine import AsyncLLMEngine
from workers.build import build_engine
from workers.channel import WorkerChannel
from workers.config import EngineConfig
from workers.control import WorkerControl
from workers.counters import engine_counters
from workers.evidence import quarantine_reason, write_event_log
from workers.model_loader import load_runner, make_cache
from workers.model_runner import CpuModelRunner
from workers.planted import PlantedFault, PlantedParts, planted_parts
from workers.runner_config import RunnerConfig

logger = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 0.5
BEAT_TIMEOUT_S = 5.0
SNAPSHOT_TIMEOUT_S = 1.0  # well below the router's patience with silent workers
ENGINE_SILENCE_S = 60.0  # a step that takes longer than this hangs


@dataclass(frozen=True)
class WorkerSettings:
    """All that a worker needs; holds paths of secrets, never secrets."""

    model: str
    engine: EngineConfig
    runner: RunnerConfig
    secret_file: Path
    channel_host: str  # "node": the address of this Ray node
    router_name: str
    router_namespace: str
    redis_url_file: Path | None
    index_namespace: str
    drain_timeout_s: float
    drain_file: Path | None = None  # while it is there, this worker takes no new work
    quarantine_dir: Path | None = None  # where the event log of a quarantined worker is kept
    planted: PlantedFault | None = None
    lora_dir: Path | None = None  # operators may load adapters below it at run time
    first_max_num_seqs: int | None = None  # below the engine's own limit until somebody raises it


class WorkerReplica:
    """One engine and its connections. A new process is a new epoch: nothing of an old life is ever inherited."""

    async def __init__(self, settings: WorkerSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = settings
        self._epoch = new_epoch()
        self._worker_id = WorkerId(f"worker-{serve.get_replica_context().replica_id.unique_id}")
        self._sequence = 0
        self._sequence_lock = threading.Lock()
        self._drain_notice = DrainNotice(settings.drain_file)
        self._is_warm = False
        self._last_snapshot: WorkerSnapshot | None = None
        self._engine_answered_s = math.inf  # until the engine has started
        self._is_log_kept = False
        self._is_registration_due = False
        self._router_actor: Any = None
        self._planted = planted_parts(settings.planted, serve.get_replica_context().rank.rank)
        others = thread_ids()
        self._runner = await asyncio.to_thread(_load_runner, settings.runner, self._planted)
        computing = thread_ids() - others
        self._engine = self._build_engine()
        host = ray.util.get_node_ip_address() if settings.channel_host == "node" else settings.channel_host
        token = channel_token(settings.secret_file.read_bytes().strip())
        adapters = AdapterLoader(self._engine, self._runner, settings.lora_dir, self._note_adapters)
        self._control = WorkerControl(self._engine, self._keyer, self._note_warm, self._beat_now, adapters)
        self._channel = WorkerChannel(self._engine, self._control, token, self._epoch, host)
        address = await self._channel.start()
        self._engine.start()
        yield_to_engines({*computing, self._engine.thread_id})
        self._engine_answered_s = time.monotonic()
        self._info = self._describe(address)
        self._publisher = self._build_publisher()
        self._tasks = [asyncio.create_task(self._beat_forever())]
        if self._publisher is not None:
            self._tasks.append(asyncio.create_task(self._publisher.run()))
        logger.info("%s (epoch %s) serves on %s", self._worker_id, self._epoch, address)

    async def check_health(self) -> None:
        """Asked by Serve; raising means: replace this process."""
        if self._engine.is_dead:
            raise RuntimeError("the engine is dead")
        if time.monotonic() - self._engine_answered_s > ENGINE_SILENCE_S:
            raise RuntimeError(f"the engine has not answered for {ENGINE_SILENCE_S:.0f} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve, for its autoscaler (cluster/autoscaling.py): requests per sequence slot."""
        last = self._last_snapshot
        if last is None:
            return {"occupancy": 0.0}
        return {"occupancy": (last.num_running + last.num_waiting) / max(1, last.max_num_seqs)}

    async def __del__(self) -> None:
        """Serve's word for shutting down: take nothing new, let streams end, then stop."""
        self._drain_notice.give()
        await self._beat()
        waited = 0.0
        while self._channel.num_requests and waited < self._settings.drain_timeout_s:
            await asyncio.sleep(0.1)
            waited += 0.1
        for task in self._tasks:
            task.cancel()
        if self._publisher is not None:
            await self._publisher.aclose()
        await self._channel.stop(grace_s=1.0)
        await asyncio.to_thread(self._engine.stop)

    def _build_engine(self) -> AsyncLLMEngine:
        settings, runner = self._settings, self._runner
        config = replace(
            settings.engine,
            num_blocks=runner.num_blocks,
            max_model_len=min(settings.engine.max_model_len or runner.max_model_len, runner.max_model_len),
        )
        self._engine_config = config
        make_keyer = BlockKeyer if self._planted is None else self._planted.keyer
        self._keyer = make_keyer(settings.secret_file.read_bytes().strip(), runner.identity)
        wrap = None if self._planted is None else self._planted.wrap_runner
        engine = build_engine(
            config,
            runner if wrap is None else wrap(runner),
            self._keyer,
            None if self._planted is None else self._planted.engine,
        )
        if settings.first_max_num_seqs is not None:
            engine.set_max_num_seqs(min(settings.first_max_num_seqs, config.max_num_seqs))
        return AsyncLLMEngine(engine, self._on_outputs, self._take_events)

    def _build_publisher(self) -> IndexPublisher | None:
        path = self._settings.redis_url_file
        if path is None:
            return None
        url = path.read_text(encoding="utf-8").strip()
        settings = IndexSettings(self._settings.index_namespace)
        return IndexPublisher(url, settings, self._worker_id, self._epoch)

    def _describe(self, address: str) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self._worker_id,
            epoch=self._epoch,
            replica_id=address,
            model=self._settings.model,
            numerics=self._runner.numerics,
            block_size_tokens=self._settings.engine.block_size,
            num_blocks=self._runner.num_blocks,
            max_num_seqs=self._settings.engine.max_num_seqs,
            max_model_len=self._engine_config.max_model_len,
            source_model=self._runner.identity.model,
            weights_digest=self._runner.identity.weights_digest,
            dtype=self._runner.identity.dtype,
            kv_layout=self._runner.identity.kv_layout,
            vocab_size=self._runner.vocab_size,
            eos_token_ids=self._runner.eos_token_ids,
            adapters=self._runner.adapters,
            is_warm=False,
        )

    async def _beat_forever(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    async def _beat(self) -> None:
        """One heartbeat. A router that is gone asks for what it lacks when it is back."""
        try:
            async with asyncio.timeout(BEAT_TIMEOUT_S):
                await self._tell_router()
        except (ray.exceptions.RayError, TimeoutError):
            self._router_actor = None
            logger.info("the router does not answer")
        except Exception:
            self._router_actor = None
            logger.exception("heartbeat failed; trying again")

    async def _tell_router(self) -> None:
        router = self._router()
        if router is None:
            return
        info = replace(self._info, is_warm=self._is_warm)
        snapshot = await self._snapshot_if_free()
        if snapshot is None:
            await router.register.remote(info)  # a long step has nothing to report, but the worker lives
            return
        wishes = await router.report.remote(snapshot)
        if wishes["register"] or self._is_registration_due:
            self._is_registration_due = False
            await router.register.remote(info)
        if wishes["publish_snapshot"]:
            await asyncio.to_thread(self._publish_snapshot)

    async def _snapshot_if_free(self) -> WorkerSnapshot | None:
        """None while the engine is in a step that takes long."""
        if self._engine.is_dead:
            return replace(self._last_snapshot, is_healthy=False, request_ids=()) if self._last_snapshot else None
        try:
            self._last_snapshot = await asyncio.wait_for(self._snapshot(), SNAPSHOT_TIMEOUT_S)
        except TimeoutError:
            return None
        self._engine_answered_s = time.monotonic()
        if not self._last_snapshot.is_healthy and not self._is_log_kept:
            self._is_log_kept = True
            await self._keep_event_log()
        return self._last_snapshot

    async def _keep_event_log(self) -> None:
        """The evidence outlives the worker: who touched which block when, and why it was quarantined."""
        records, reason, violations = await asyncio.wrap_future(
            self._engine.call(lambda engine: (tuple(engine.event_log), quarantine_reason(engine), engine.violations[:]))
        )
        assert reason is not None, "asked for only after a heartbeat that said so"
        logger.error("%s is quarantined: %s", self._worker_id, reason)
        if self._settings.quarantine_dir is None:
            return
        path = self._settings.quarantine_dir / f"{self._worker_id}-{self._epoch}.jsonl"
        corrupted = {found.request_id: found.step_id for found in violations if found.request_id is not None}
        try:
            await asyncio.to_thread(write_event_log, path, records, reason, corrupted)
        except OSError as error:
            logger.error("the event log could not be kept in %s: %s", path.parent, error.strerror)

    def _router(self) -> Any:
        # Looked up again after every failure: a recreated actor has a new handle under the old name.
        if self._router_actor is None:
            with suppress(ValueError):
                self._router_actor = ray.get_actor(
                    self._settings.router_name, namespace=self._settings.router_namespace
                )
        return self._router_actor

    async def _snapshot(self) -> WorkerSnapshot:
        load, counters = await asyncio.wrap_future(
            self._engine.call(lambda engine: (engine.load(), engine_counters(engine)))
        )
        return WorkerSnapshot(
            worker_id=self._worker_id,
            epoch=self._epoch,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            pending_prefill_tokens=load.pending_prefill_tokens,
            num_free_blocks=load.num_free_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_step_s=load.decode_step_s,
            request_ids=load.request_ids,
            is_draining=self._drain_notice.is_given or not self._is_warm,
            is_healthy=load.is_healthy,
            counters=counters,
            max_num_seqs=dict(counters)["max_num_seqs"],
        )

    def _on_outputs(self, outputs: list[RequestOutput]) -> None:
        """Called on the step thread, once a step."""
        outputs = self._control.take(outputs)
        if outputs:
            self._channel.on_outputs(outputs)

    def _note_warm(self) -> None:
        """Templates are in place: from the next heartbeat on, which is now, the router may send work."""
        if not self._is_warm:
            self._is_warm = True
            self._beat_now()

    def _note_adapters(self) -> None:
        """The router tells the gateways, which announce what every worker has."""
        self._info = replace(self._info, adapters=self._runner.adapters)
        self._is_registration_due = True
        self._beat_now()

    def _beat_now(self) -> None:
        """News that the router should not have to wait for."""
        self._tasks.append(asyncio.create_task(self._beat()))

    def _take_events(self, events: list[BlockEvent]) -> None:
        """Called on the engine's event thread, in order."""
        with self._sequence_lock:
            self._sequence += 1
            if self._publisher is not None:
                self._publisher.publish(EventBatch(self._worker_id, self._epoch, self._sequence, tuple(events)))

    def _publish_snapshot(self) -> None:
        # Under the lock no batch gets a number between taking the keys and naming the last batch they contain.
        # Events that the keys contain already but no batch has carried yet are applied twice: that changes nothing.
        with self._sequence_lock:
            keys = self._engine.call(lambda engine: engine.cached_keys()).result()
            if self._publisher is not None:
                self._publisher.publish_snapshot(Snapshot(self._worker_id, self._epoch, self._sequence, keys))


def _load_runner(config: RunnerConfig, planted: PlantedParts | None) -> CpuModelRunner:
    runner = load_runner(config, lambda what, fraction: logger.info("%s: %.0f %%", what, 100 * fraction))
    if planted is None or planted.wrap_model is None:
        return runner
    model = planted.wrap_model(runner.model)
    return CpuModelRunner(config, model, make_cache(config, model), runner.source, runner.numerics)
