"""Keeps every worker's pinned template blocks equal to what the catalog says, new workers before they take traffic.

Template blocks are written here and nowhere else, so whether they hit does not depend on what any user did.

Each tenant's templates go their own way: prepared one after the other, run on each worker one after the other. What one
tenant makes slow or impossible holds up that tenant; the others take turns with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from cache_service.block_key import BlockKeyer
from cluster.api.channel import KeepPins, WarmUp
from cluster.api.errors import OverloadedError, UnavailableError
from cluster.api.ids import BlockKey, WorkerId, new_request_id
from cluster.api.prompt import BuiltPrompt
from cluster.api.request import Request
from cluster.api.sampling import SamplingParams
from cluster.api.worker_state import WorkerInfo
from cluster.control_client import ControlCalls
from cluster.prompts.store import RegisteredTemplate

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
Chain = tuple[BlockKey, ...]
Owner = bytes | None  # a tenant's hash; None: the public templates
LifeKey = tuple[WorkerId, str]  # worker and epoch


class WarmUpSource(Protocol):
    """What is needed of a TemplateCatalog. `prepare` takes as long as the template's author likes."""

    def unprepared(self) -> Sequence[RegisteredTemplate]: ...
    def prepare(self, registered: RegisteredTemplate) -> None: ...
    def prepared_warm_ups(self) -> Sequence[BuiltPrompt]: ...


@dataclass(frozen=True, slots=True)
class WarmerConfig:
    patience_s: float = 60.0  # how long a caller of `sync`, and a new worker's readiness, wait for templates at most
    retry_s: float = 10.0  # a template or worker with which it did not work is left alone for so long
    num_threads: int = 4  # for preparing templates; of their own, so that no request waits for one

    def __post_init__(self) -> None:
        if not 0.01 <= self.patience_s <= 3600:
            raise ValueError(f"patience_s is {self.patience_s}, allowed are 0.01 to 3600")
        if not 0.01 <= self.retry_s <= 3600:
            raise ValueError(f"retry_s is {self.retry_s}, allowed are 0.01 to 3600")
        if not 1 <= self.num_threads <= 64:
            raise ValueError(f"num_threads is {self.num_threads}, allowed are 1 to 64")


@dataclass(frozen=True, slots=True)
class _Job:
    """What is under way, at most once each. `life` None: preparing the owner's templates."""

    kind: str
    owner: Owner = None
    life: LifeKey | None = None


@dataclass
class _Life:
    """One life of a worker. Under `lock` one call changes its pins at a time, in the order of asking."""

    worker: WorkerInfo
    first_seen_s: float
    held: set[Chain] = field(default_factory=set)
    retry_at_s: dict[Chain, float] = field(default_factory=dict)
    call_again_s: float = 0.0  # it did not answer
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_trimmed: bool = False
    is_ready: bool = False

    @property
    def key(self) -> LifeKey:
        return self.worker.worker_id, self.worker.epoch


class TemplateWarmer:
    """`run` looks once a second; `sync` does it now and returns when every reachable worker is up to date."""

    def __init__(
        self,
        source: WarmUpSource,
        keyer: BlockKeyer,
        control: ControlCalls,
        model: str,
        config: WarmerConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._keyer = keyer
        self._control = control
        self._model = model
        self._config = config or WarmerConfig()
        self._clock = clock
        self._threads = ThreadPoolExecutor(self._config.num_threads, thread_name_prefix="prepare")
        self._lives: dict[LifeKey, _Life] = {}
        self._jobs: dict[_Job, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self._look()
                except Exception:
                    logger.exception("template warm-up failed; trying again")
                await asyncio.sleep(PERIOD_S)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def sync(self, *owners: Owner) -> None:
        """Until the owners' templates are where they belong (none named: everybody's), or patience ends; the rest
        follows."""
        deadline_s = self._clock() + self._config.patience_s
        while (left_s := deadline_s - self._clock()) > 0:
            await self._look()
            tasks = [task for job, task in self._jobs.items() if not owners or job.owner in owners]
            if not tasks:
                return
            await asyncio.wait(tasks, timeout=left_s)

    async def _look(self) -> None:
        """Starts what there is to do and is not under way."""
        self._follow_members()
        unprepared: dict[Owner, list[RegisteredTemplate]] = {}
        for registered in await asyncio.to_thread(self._source.unprepared):
            unprepared.setdefault(registered.tenant, []).append(registered)
        for owner, templates in unprepared.items():
            self._start(_Job("prepare", owner), lambda each=templates: self._prepare(each))  # type: ignore[misc]
        wanted = await asyncio.to_thread(self._wanted)
        for life in self._lives.values():
            self._start_for(life, wanted)

    def _start_for(self, life: _Life, wanted: dict[Chain, BuiltPrompt]) -> None:
        if self._clock() < life.call_again_s:
            return
        if not life.is_trimmed or life.held - wanted.keys():
            self._start(_Job("trim", life=life.key), lambda: self._trim(life))
        due: dict[Owner, dict[Chain, BuiltPrompt]] = {}
        for chain, prompt in wanted.items():
            if chain not in life.held and self._clock() >= life.retry_at_s.get(chain, 0.0):
                due.setdefault(prompt.spans[0].fields.tenant, {})[chain] = prompt
        for owner, prompts in due.items():
            self._start(_Job("warm", owner, life.key), lambda each=prompts: self._warm_up(life, each))  # type: ignore[misc]
        is_busy = any(job.kind == "prepare" or job.life == life.key for job in self._jobs)
        if not life.is_ready and (not is_busy or self._clock() - life.first_seen_s > self._config.patience_s):
            self._start(_Job("ready", life=life.key), lambda: self._make_ready(life))

    def _follow_members(self) -> None:
        members = {(worker.worker_id, worker.epoch): worker for worker in self._control.members}
        self._lives = {key: life for key, life in self._lives.items() if key in members}
        for key, worker in members.items():
            self._lives.setdefault(key, _Life(worker, self._clock()))

    def _start(self, job: _Job, work: Callable[[], Coroutine[None, None, None]]) -> None:
        if job in self._jobs:
            return
        self._jobs[job] = task = asyncio.create_task(work())

        def forget(task: asyncio.Task[None]) -> None:
            del self._jobs[job]
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("template warm-up failed; trying again", exc_info=error)

        task.add_done_callback(forget)

    async def _prepare(self, templates: Sequence[RegisteredTemplate]) -> None:
        loop = asyncio.get_running_loop()
        for registered in templates:  # one at a time: between two of them the threads are another tenant's
            try:
                await loop.run_in_executor(self._threads, self._source.prepare, registered)
            except OverloadedError:
                return  # no sandbox process was free: with the next look

    async def _trim(self, life: _Life) -> None:
        async with life.lock:
            wanted = await asyncio.to_thread(self._wanted)  # within the lock: nothing is warmed that this does not name
            try:
                await self._control.call(life.worker, KeepPins(frozenset(key for chain in wanted for key in chain)))
            except UnavailableError as error:
                logger.warning("%s; it is asked again", error.message)
                life.call_again_s = self._clock() + self._config.retry_s
                return
            life.held &= wanted.keys()
            life.is_trimmed = True

    async def _warm_up(self, life: _Life, prompts: dict[Chain, BuiltPrompt]) -> None:
        for chain, prompt in prompts.items():
            async with life.lock:
                try:
                    warm_up = WarmUp((self._request(prompt, chain),), is_complete=False)
                    num_pinned = await self._control.call(life.worker, warm_up)
                except UnavailableError as error:
                    logger.warning("%s; that template is tried again", error.message)
                    life.retry_at_s[chain] = self._clock() + self._config.retry_s
                    continue
            if num_pinned != len(chain):
                logger.warning("%s pinned %s of %d template blocks", life.worker.worker_id, num_pinned, len(chain))
            life.held.add(chain)

    async def _make_ready(self, life: _Life) -> None:
        try:
            await self._control.call(life.worker, WarmUp(()))
        except UnavailableError as error:
            logger.warning("%s; it takes no traffic before", error.message)
            life.call_again_s = self._clock() + self._config.retry_s
            return
        life.is_ready = True

    def _wanted(self) -> dict[Chain, BuiltPrompt]:
        warm_ups = self._source.prepared_warm_ups()
        return {self._keyer.prompt_keys(each.token_ids, each.spans): each for each in warm_ups}

    def _request(self, prompt: BuiltPrompt, chain: Chain) -> Request:
        private = prompt.spans[-1].fields
        assert private.tenant is not None
        assert private.user is not None
        return Request(
            request_id=new_request_id(),
            model=self._model,
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True),
            spans=prompt.spans,
            block_keys=chain,
            tenant_hash=private.tenant,
            user_hash=private.user,
        )
