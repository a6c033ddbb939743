"""One tenant floods, another asks single short questions: how much later do its first tokens come?

The router and two engines are the real ones; only the model is not, and a step takes the virtual time that was
measured for such a step of SmolLM2 (router/simulate/config.py). So the figure does not depend on who else uses the
machine. tests/e2e/measure_fairness.py measures the same on a running cluster.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import quantiles
from typing import Any

from engine_builders import make_request
from fake_runner import SECRET, FakeModelRunner, fake_identity
from router_builders import ManualClock

from cache_service.block_key import BlockKeyer
from cache_service.prefix_index import InMemoryPrefixIndex
from cluster.api.ids import RequestId, WorkerId
from cluster.api.request import Request
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.worker_state import WorkerInfo, WorkerSnapshot
from cluster.app import _engine_config
from cluster.config import ClusterConfig
from router.config import AdmissionConfig, RouterConfig
from router.router import Router
from router.simulate.config import MEASURED_STEP_COST
from workers.build import build_engine
from workers.engine import LLMEngine
from workers.step import SampledToken, StepInput, StepOutput

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 4000, 2048
KEYER = BlockKeyer(SECRET, fake_identity(BLOCK_SIZE))
FLOODING_CLIENTS, FLOOD_PROMPT, FLOOD_OUTPUT = 24, 400, 100
PROBE_PROMPT, PROBE_OUTPUT = 100, 4
FRONT_DOOR_S = 0.015  # HTTP, rendering, tokenizing, placing: the same in both cases


class TimedRunner(FakeModelRunner):
    """Answers at once and says how long a real model would have taken."""

    last_duration_s = 0.0

    def execute(self, step: StepInput) -> StepOutput:
        num_prefill = sum(len(row.token_ids) for row in step.rows if len(row.token_ids) > 1)
        num_decoding = sum(len(row.token_ids) == 1 for row in step.rows)
        self.last_duration_s = MEASURED_STEP_COST.duration_s(num_prefill, num_decoding)
        return StepOutput([[SampledToken(5) for _ in row.samples] for row in step.rows])


@dataclass
class SimulatedWorker:
    worker_id: WorkerId
    engine: LLMEngine
    runner: TimedRunner
    is_stepping: bool = False


@dataclass
class Flow:
    """A closed loop of clients of one tenant."""

    tenant: str
    prompt: int
    output: int
    pause_s: tuple[float, float] = (0.0, 0.0)
    first_token_s: list[float] = field(default_factory=list)


class Simulation:
    """Discrete events over one virtual clock; requests that wait in the router's queue are real tasks."""

    def __init__(self, settings: ClusterConfig, admission: AdmissionConfig) -> None:
        self.clock = ManualClock()
        self.draw = random.Random(3)
        index = InMemoryPrefixIndex(clock=self.clock)
        self.router = Router(
            index, RouterConfig(admission=admission), clock=self.clock, unix_clock=self.clock, random=self.draw
        )
        self.workers = [self._worker(WorkerId(f"w{number}"), settings) for number in range(2)]
        self._events: list[tuple[float, int, Any]] = []
        self._order = count()
        self._started: dict[RequestId, tuple[Flow, float]] = {}
        self._placing: dict[asyncio.Task[RouteDecision], Request] = {}
        self._has_token: set[RequestId] = set()

    def _worker(self, worker_id: WorkerId, settings: ClusterConfig) -> SimulatedWorker:
        runner = TimedRunner(NUM_BLOCKS, BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
        config = replace(_engine_config(settings), num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN)
        engine = build_engine(config, runner, KEYER)
        self.router.register(
            WorkerInfo(worker_id, "e", "r", "fake", "n", BLOCK_SIZE, NUM_BLOCKS, config.max_num_seqs, MAX_MODEL_LEN)
        )
        return SimulatedWorker(worker_id, engine, runner)

    async def run(self, flows: Sequence[tuple[Flow, int]], probe: Flow, num_probes: int) -> None:
        """Until `probe` has its figures. Each flow comes with its number of clients."""
        for flow, num_clients in flows:
            for client in range(num_clients):
                self._at(self.clock.now_s + 0.05 * client, self._ask, flow)
        self._at(self.clock.now_s, self._beat)
        while len(probe.first_token_s) < num_probes:
            self.clock.now_s, _, (action, arguments) = heapq.heappop(self._events)
            action(*arguments)
            await self._settle()
        for task in self._placing:
            task.cancel()
        await asyncio.gather(*self._placing, return_exceptions=True)

    def _at(self, when_s: float, action: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), (action, arguments)))

    def _ask(self, flow: Flow) -> None:
        prompt = [self.draw.randrange(6, 900) for _ in range(flow.prompt)]
        request = make_request(prompt, flow.output, tenant=flow.tenant, user="u", keyer=KEYER, ignore_eos=True)
        self._started[request.request_id] = (flow, self.clock.now_s)
        query = RouteQuery(
            request.request_id,
            "fake",
            request.block_keys,
            request.num_prompt_tokens,
            flow.output,
            request.tenant_hash,
            request.user_hash,
        )
        self._placing[asyncio.ensure_future(self.router.route(query))] = request

    async def _settle(self) -> None:
        """Lets the tasks that wait for the router go on, and starts the workers that have got something to do."""
        for _ in range(4):
            await asyncio.sleep(0)
        for task in [task for task in self._placing if task.done()]:
            request = self._placing.pop(task)
            worker = next(w for w in self.workers if w.worker_id == task.result().worker_id)
            worker.engine.add_request(request)
        for worker in self.workers:
            if worker.engine.has_work and not worker.is_stepping:
                worker.is_stepping = True
                outputs = worker.engine.step()
                self._at(self.clock.now_s + worker.runner.last_duration_s, self._end_step, worker, outputs)

    def _end_step(self, worker: SimulatedWorker, outputs: Any) -> None:
        worker.is_stepping = False
        for output in outputs:
            assert output.error is None, output.error
            flow, started_s = self._started[output.request_id]
            if output.request_id not in self._has_token:
                self._has_token.add(output.request_id)
                flow.first_token_s.append(self.clock.now_s - started_s + FRONT_DOOR_S)
                self.router.first_token(output.request_id)
            if output.finished:
                self.router.release(output.request_id)
                self._at(self.clock.now_s + self.draw.uniform(*flow.pause_s), self._ask, flow)

    def _beat(self) -> None:
        for worker in self.workers:
            load = worker.engine.load()
            self.router.report(
                WorkerSnapshot(
                    worker.worker_id,
                    "e",
                    load.num_running,
                    load.num_waiting,
                    load.pending_prefill_tokens,
                    load.num_free_blocks,
                    1.0 / MEASURED_STEP_COST.prefill_token_s,
                    MEASURED_STEP_COST.duration_s(0, 4),
                    load.request_ids,
                )
            )
        self._at(self.clock.now_s + 0.5, self._beat)


async def p95_s(
    *, is_flooded: bool, settings: ClusterConfig, admission: AdmissionConfig, num_probes: int = 300
) -> float:
    probe = Flow("small", PROBE_PROMPT, PROBE_OUTPUT, pause_s=(0.5, 2.0))
    flows = [(probe, 1)]
    if is_flooded:
        flows.append((Flow("flooding", FLOOD_PROMPT, FLOOD_OUTPUT), FLOODING_CLIENTS))
    await Simulation(settings, admission).run(flows, probe, num_probes)
    return quantiles(probe.first_token_s[num_probes // 6 :], n=20)[-1]


async def test_a_flood_delays_another_tenants_first_tokens_by_less_than_2_5_times() -> None:
    settings, admission = ClusterConfig(), AdmissionConfig()
    alone = await p95_s(is_flooded=False, settings=settings, admission=admission)
    flooded = await p95_s(is_flooded=True, settings=settings, admission=admission)
    print(f"first token p95: alone {alone:.3f} s, beside a flood {flooded:.3f} s, {flooded / alone:.2f} times")
    assert flooded < 2.5 * alone


async def test_without_a_reserved_place_it_would_be_more() -> None:
    """The paired check: the measurement can tell."""
    settings, admission = ClusterConfig(), AdmissionConfig(reserved_seqs_per_worker=0, max_queue_wait_s=600)
    alone = await p95_s(is_flooded=False, settings=settings, admission=admission, num_probes=30)
    flooded = await p95_s(is_flooded=True, settings=settings, admission=admission, num_probes=30)
    print(f"without a reserved place: {flooded / alone:.2f} times")
    assert flooded > 2.5 * alone
