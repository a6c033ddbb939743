"""Every worker holds every template before it takes traffic, and no tenant's templates hold up another's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from cache_service.block_key import BlockKeyer, ModelIdentity
from cluster.api.channel import ControlCall, KeepPins, WarmUp
from cluster.api.errors import OverloadedError, UnavailableError
from cluster.api.ids import BlockKey, WorkerId
from cluster.api.prompt import BuiltPrompt
from cluster.api.scope import Scope, ScopeFields, ScopeSpan
from cluster.api.worker_state import WorkerInfo
from cluster.template_warmer import TemplateWarmer, WarmerConfig

BLOCK = 4
KEYER = BlockKeyer(b"s" * 32, ModelIdentity("m", b"w", "float32", "l", BLOCK))


@dataclass(frozen=True)
class Template:
    tenant: bytes
    id: str

    @property
    def warm_up(self) -> BuiltPrompt:
        tokens = tuple(self.id.encode().ljust(2 * BLOCK))
        shared = ScopeFields(Scope.TEMPLATE, self.tenant, template=self.id.encode())
        nobody = ScopeFields(Scope.USER, self.tenant, user=b"nobody")
        return BuiltPrompt(tokens, (ScopeSpan(2, shared), ScopeSpan(None, nobody)))

    @property
    def chain(self) -> tuple[BlockKey, ...]:
        return KEYER.prompt_keys(self.warm_up.token_ids, self.warm_up.spans)


class Source:
    """Templates that take until `let_go` to prepare, if their tenant is among `slow`."""

    def __init__(self, *templates: Template) -> None:
        self.templates = list(templates)
        self.prepared: set[Template] = set()
        self.slow: set[bytes] = set()
        self.busy: set[bytes] = set()
        self.let_go = threading.Event()

    def unprepared(self) -> list[Any]:
        return [each for each in self.templates if each not in self.prepared]

    def prepare(self, registered: Any) -> None:
        if registered.tenant in self.slow:
            assert self.let_go.wait(200)
        if registered.tenant in self.busy:
            raise OverloadedError("no process is free")
        self.prepared.add(registered)

    def prepared_warm_ups(self) -> list[BuiltPrompt]:
        return [each.warm_up for each in self.templates if each in self.prepared]


class Workers:
    """What they hold; `refused` templates fail there, `held_up` ones take until `let_go`."""

    def __init__(self, *names: str) -> None:
        self.members = tuple(worker(name) for name in names)
        self.pinned: dict[str, set[BlockKey]] = {name: set() for name in names}
        self.ready: set[str] = set()
        self.log: list[tuple[str, bytes]] = []
        self.refused: set[bytes] = set()
        self.held_up: set[bytes] = set()
        self.let_go = asyncio.Event()
        self.gone: set[str] = set()
        self.num_refusals = 0

    async def call(self, worker: WorkerInfo, call: ControlCall) -> Any:
        await asyncio.sleep(0)
        if worker.worker_id in self.gone:
            self.num_refusals += 1
            raise UnavailableError("gone")
        pinned = self.pinned[worker.worker_id]
        if isinstance(call, KeepPins):
            pinned &= call.keys
            return 0
        assert isinstance(call, WarmUp)
        for request in call.requests:
            self.log.append((worker.worker_id, request.tenant_hash))
            if request.tenant_hash in self.held_up:
                await self.let_go.wait()
            if request.tenant_hash in self.refused:
                raise UnavailableError("warm-up failed")
            pinned |= set(request.block_keys)
        if call.is_complete:
            self.ready.add(worker.worker_id)
        return sum(len(request.block_keys) for request in call.requests)

    def holds(self, name: str, *templates: Template) -> bool:
        return all(self.pinned[name] >= set(each.chain) for each in templates)


def worker(name: str) -> WorkerInfo:
    return WorkerInfo(WorkerId(name), "e", "address", "m", "n", BLOCK, 100, 8, 1000)


def standing() -> float:
    """A clock that no retry and no end of patience comes from."""
    return 0.0


@asynccontextmanager
async def warmer_of(
    source: Source, workers: Workers, *, clock: Callable[[], float] = standing, **config: float
) -> AsyncIterator[TemplateWarmer]:
    warmer = TemplateWarmer(source, KEYER, workers, "m", WarmerConfig(**config), clock=clock)  # type: ignore[arg-type]
    try:
        yield warmer
    finally:
        source.let_go.set()
        workers.let_go.set()
        running = asyncio.create_task(warmer.run())
        await asyncio.sleep(0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


OURS, THEIRS = Template(b"ours", "a"), Template(b"theirs", "b")


async def test_every_worker_holds_everything_before_it_takes_traffic() -> None:
    source, workers = Source(OURS, THEIRS), Workers("w0", "w1")
    async with warmer_of(source, workers) as warmer:
        await warmer.sync()
    for name in ("w0", "w1"):
        assert workers.holds(name, OURS, THEIRS)
    assert workers.ready == {"w0", "w1"}
    assert len(workers.log) == 4, "each template once on each worker"


async def test_what_is_gone_is_unpinned_and_what_stays_is_not_run_again() -> None:
    source, workers = Source(OURS, THEIRS), Workers("w0")
    async with warmer_of(source, workers) as warmer:
        await warmer.sync()
        source.templates.remove(THEIRS)
        await warmer.sync()
    assert workers.pinned["w0"] == set(OURS.chain)
    assert len(workers.log) == 2


async def test_a_new_worker_is_warmed_and_a_new_life_anew() -> None:
    source, workers = Source(OURS), Workers("w0", "w1")
    late, workers.members = workers.members[1:], workers.members[:1]
    async with warmer_of(source, workers) as warmer:
        await warmer.sync()
        assert workers.ready == {"w0"}
        workers.members += late
        await warmer.sync()
    assert workers.holds("w1", OURS)
    assert workers.ready == {"w0", "w1"}


async def test_a_template_that_is_slow_to_prepare_holds_up_its_own_tenant_only() -> None:
    source, workers = Source(OURS), Workers("w0")
    source.templates += [Template(b"theirs", f"slow {number}") for number in range(10)]
    source.slow = {b"theirs"}
    async with warmer_of(source, workers, num_threads=2) as warmer:
        async with asyncio.timeout(60):
            await warmer.sync(b"ours")
        assert workers.holds("w0", OURS)
        source.templates.append(another := Template(b"ours", "another"))
        async with asyncio.timeout(60):
            await warmer.sync(b"ours")
        assert workers.holds("w0", another)
        assert not source.prepared & set(source.templates[1:11])


async def test_a_template_that_runs_for_long_holds_up_its_own_tenant_only() -> None:
    """One worker is busy with it; on the other one everybody else goes on, and there they take turns."""
    source, workers = Source(*(Template(b"theirs", f"long {number}") for number in range(5)), OURS), Workers("w0")
    source.prepared = set(source.templates)
    workers.held_up = {b"theirs"}
    async with warmer_of(source, workers) as warmer:
        waiting = asyncio.create_task(warmer.sync(b"ours"))
        async with asyncio.timeout(60):
            while not workers.log:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # ours, which was begun in the same moment, stands behind the first of theirs
        workers.let_go.set()
        await waiting
        assert workers.holds("w0", OURS)
    assert workers.log[:2].count(("w0", b"theirs")) <= 1, "at most one of theirs goes first"


async def test_a_template_that_fails_keeps_no_worker_from_its_traffic() -> None:
    source, workers = Source(THEIRS, OURS), Workers("w0")
    workers.refused = {b"theirs"}
    async with warmer_of(source, workers) as warmer:
        async with asyncio.timeout(60):
            await warmer.sync()
        assert workers.ready == {"w0"}
        assert workers.holds("w0", OURS)
        assert not workers.holds("w0", THEIRS)
        await warmer.sync()
    assert workers.log.count(("w0", b"theirs")) == 1, "not again before its time"


async def test_a_failed_template_is_tried_again() -> None:
    source, workers = Source(THEIRS), Workers("w0")
    workers.refused = {b"theirs"}
    now_s = 0.0
    async with warmer_of(source, workers, clock=lambda: now_s) as warmer:
        await warmer.sync()
        workers.refused = set()
        now_s = 11.0
        await warmer.sync()
    assert workers.holds("w0", THEIRS)


async def test_a_new_worker_waits_for_templates_no_longer_than_its_patience() -> None:
    source, workers = Source(THEIRS, OURS), Workers("w0")
    source.slow = {b"theirs"}
    now_s = 0.0
    async with warmer_of(source, workers, clock=lambda: now_s) as warmer:
        await warmer.sync(b"ours")
        assert workers.ready == set(), "what can be had is waited for"
        now_s = 61.0
        async with asyncio.timeout(60):
            while not workers.ready:
                await warmer.sync(b"ours")
                await asyncio.sleep(0.01)


async def test_a_worker_that_does_not_answer_is_left_alone_for_a_while() -> None:
    source, workers = Source(OURS), Workers("w0", "gone")
    workers.gone = {"gone"}
    async with warmer_of(source, workers) as warmer:
        async with asyncio.timeout(60):
            await warmer.sync()
        assert workers.num_refusals <= 3
    assert workers.holds("w0", OURS)
    assert workers.ready == {"w0"}


async def test_a_busy_sandbox_is_asked_again() -> None:
    source, workers = Source(OURS), Workers("w0")
    source.busy = {b"ours"}
    seconds = count()  # one passes with each look at the clock
    async with warmer_of(source, workers, clock=lambda: float(next(seconds))) as warmer:
        await warmer.sync()
        source.busy = set()
        await warmer.sync()
    assert workers.holds("w0", OURS)


@pytest.mark.parametrize("values", [{"patience_s": 0}, {"retry_s": -1}, {"num_threads": 0}])
def test_settings_are_checked(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="allowed are"):
        WarmerConfig(**values)  # type: ignore[arg-type]
