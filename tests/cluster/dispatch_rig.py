"""Real token streams between a dispatcher and workers whose engine is a script: token = f(prompt, position)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from cluster.api.channel import ControlCall
from cluster.api.errors import UnavailableError, WatchwordError
from cluster.api.ids import PrincipalHash, RequestId, WorkerId
from cluster.api.output import ChoiceDelta, FinishReason, RequestOutput
from cluster.api.request import Request
from cluster.api.routing import RouteDecision, RouteQuery
from cluster.api.sampling import SamplingParams
from cluster.api.scope import Scope, ScopeFields, ScopeSpan
from cluster.dispatch import Dispatcher, WorkerPool
from cluster.worker_client import WorkerClient
from workers.channel import WorkerChannel

TOKEN = "token"
TENANT, USER = PrincipalHash(b"t" * 32), PrincipalHash(b"u" * 32)
_numbers = count()


def make_request(prompt: tuple[int, ...] = (1, 2, 3), *, n: int = 1, max_tokens: int = 20) -> Request:
    return Request(
        request_id=RequestId(f"request-{next(_numbers)}"),
        model="m",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, n=n, seed=1),
        spans=(ScopeSpan(None, ScopeFields(Scope.USER, tenant=TENANT, user=USER)),),
        block_keys=(),
        tenant_hash=TENANT,
        user_hash=USER,
    )


def token_at(request: Request, choice: int, position: int) -> int:
    return hash((request.prompt_token_ids, choice, position)) % 50_000


def length_of(request: Request, choice: int) -> int:
    """Choices end at different lengths."""
    return max(1, request.sampling.max_tokens - 5 * choice)


def expected(request: Request) -> list[list[int]]:
    return [
        [token_at(request, choice, position) for position in range(length_of(request, choice))]
        for choice in range(request.sampling.n)
    ]


class ScriptedEngine:
    """One token of every choice per tick. `pause` holds all; `refusal` answers every submission."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.channel: WorkerChannel
        self.pause_s = pause_s
        self.refusal: WatchwordError | None = None
        self.is_paused = False
        self.stop_after: int | None = None  # tokens of a choice; then nothing more comes
        self.submitted: list[Request] = []
        self.aborted: list[RequestId] = []
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def submit(self, request: Request) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(request)
        self._tasks[request.request_id] = asyncio.create_task(self._run(request))

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        if (task := self._tasks.pop(request_id, None)) is not None:
            task.cancel()

    async def _run(self, request: Request) -> None:
        position = [len(tokens) for tokens in request.emitted] or [0] * request.sampling.n
        done: set[int] = set()
        is_first = True
        while len(done) < request.sampling.n:
            await asyncio.sleep(self.pause_s)
            if self.is_paused or (self.stop_after is not None and max(position) >= self.stop_after):
                continue
            deltas = []
            for choice in set(range(request.sampling.n)) - done:
                tokens: tuple[int, ...] = ()
                if position[choice] < length_of(request, choice):
                    tokens = (token_at(request, choice, position[choice]),)
                    position[choice] += 1
                reason = FinishReason.LENGTH if position[choice] == length_of(request, choice) else None
                if reason:
                    done.add(choice)
                deltas.append(ChoiceDelta(choice, tokens, finish_reason=reason))
            finished = len(done) == request.sampling.n
            if finished:
                del self._tasks[request.request_id]
            cached = 16 if is_first else None
            is_first = False
            output = RequestOutput(request.request_id, tuple(deltas), num_cached_tokens=cached, finished=finished)
            self.channel.on_outputs([output])


async def _no_control(_: ControlCall) -> int:
    return 0


@dataclass
class Worker:
    worker_id: WorkerId
    engine: ScriptedEngine
    channel: WorkerChannel
    address: str
    numerics: str = "same"

    async def kill(self) -> None:
        await self.channel.stop(0)


@dataclass
class RecordingRouter:
    """Places on the first worker that is not excluded and has the numerics asked for; keeps account of the places."""

    workers: list[Worker]
    held: dict[RequestId, WorkerId] = field(default_factory=dict)
    queries: list[RouteQuery] = field(default_factory=list)
    first_tokens: list[WorkerId] = field(default_factory=list)
    failed: list[WorkerId] = field(default_factory=list)

    async def route(self, query: RouteQuery) -> RouteDecision:
        self.queries.append(query)
        for worker in self.workers:
            if worker.worker_id not in query.excluded and query.numerics in (None, worker.numerics):
                self.held[query.request_id] = worker.worker_id
                return RouteDecision(worker.worker_id, f"epoch-{worker.worker_id}", worker.address, worker.numerics, 0)
        raise UnavailableError("no worker")

    def first_token(self, request_id: RequestId, worker_id: WorkerId) -> None:
        self.first_tokens.append(worker_id)

    def release(self, request_id: RequestId, worker_id: WorkerId) -> None:
        if self.held.get(request_id) == worker_id:
            del self.held[request_id]

    def worker_failed(self, worker_id: WorkerId, epoch: str) -> None:
        self.failed.append(worker_id)

    async def is_ready(self) -> bool:
        return True


@dataclass
class DispatchRig:
    workers: list[Worker]
    router: RecordingRouter
    pool: WorkerPool
    dispatcher: Dispatcher
    clients: list[WorkerClient]

    async def collect(self, request: Request) -> tuple[list[list[int]], list[RequestOutput]]:
        tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
        outputs = []
        async for output in self.dispatcher.generate(request):
            outputs.append(output)
            for delta in output.deltas:
                tokens[delta.index].extend(delta.token_ids)
        return tokens, outputs


@asynccontextmanager
async def dispatch_rig(num_workers: int = 2, pause_s: float = 0.002) -> AsyncIterator[DispatchRig]:
    workers = []
    for number in range(num_workers):
        engine = ScriptedEngine(pause_s)
        worker_id = WorkerId(f"w{number}")
        channel = WorkerChannel(engine, _no_control, TOKEN, f"epoch-{worker_id}", "127.0.0.1")
        engine.channel = channel
        workers.append(Worker(worker_id, engine, channel, await channel.start()))
    clients: list[WorkerClient] = []

    def connect(address: str, epoch: str) -> WorkerClient:
        clients.append(WorkerClient(address, TOKEN, epoch))
        return clients[-1]

    router = RecordingRouter(workers)
    pool = WorkerPool(connect)
    try:
        yield DispatchRig(workers, router, pool, Dispatcher(router, pool), clients)
    finally:
        await pool.close()
        for worker in workers:
            await worker.channel.stop(0)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
