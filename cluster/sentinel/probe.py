"""One probe: marked requests together on one worker, then each of them alone and cold, and the answers compared.

Two oracles. A marker of another request in an answer is a leak. So is any difference, in token or logprob, between the
answer in company and the answer alone: an engine that is bit-exact gives the same bits, and most corruption changes
some long before it prints a marker. The requests go the way of any request, from rendering to detokenizing.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum

from cluster.api.channel import PurgeUser, Trace
from cluster.api.errors import WatchwordError
from cluster.api.evidence import TracedEvent
from cluster.api.ids import RequestId, TenantId, new_request_id
from cluster.api.principal import Principal, Role
from cluster.api.worker_state import WorkerInfo
from cluster.auth.names import SENTINEL_TENANT
from cluster.control_client import WorkerControlClient
from cluster.dispatch import Dispatcher, WorkerPool
from cluster.experiment.markers import MarkerRegistry
from cluster.experiment.wordings import WORDINGS
from cluster.sentinel.pinned import PinnedRouter
from cluster.serving.core import ServedModel, ServingCore
from cluster.serving.generate_input import CallerFields, ChatInput, GenerateInput, SamplingInput

MAX_TOKENS = 16  # enough for any marker, which an obedient model says first
# On a fast worker the first of a few may end before the others arrive: longer answers give them the time.
_LONGER = (1, 4, 16)
TIMEOUT_S = 60.0
NUM_REQUESTS = 3  # one that goes ahead, and a pair behind it
_MAX_MARKERS = 512
# The first request's prefill has to last until the others have arrived.
_LEAD = "The river runs past the old mill and the garden behind it. " * 4
_MIN_CONTEXT = 1024
_WORDING = WORDINGS["system-last"]
_PRINCIPAL = Principal(TenantId(SENTINEL_TENANT), frozenset({Role.DELEGATE}), "sentinel", ())


class Result(Enum):
    CLEAN = "clean"
    LEAK = "leak"
    VOID = "void"  # the requests did not share a step, so nothing could have leaked
    FAILED = "failed"  # no answer, from the worker or on the way


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """`detail` names requests, steps and forms, never what an answer said."""

    result: Result
    detail: str
    num_tokens: int = 0  # prompt and output, all requests of the probe together


@dataclass(frozen=True, slots=True)
class _Marked:
    """A request of the probe, before it is sent."""

    marker: str
    user: str
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    request_id: RequestId
    text: str
    bits: tuple[tuple[int, float], ...]  # token id and logprob of each token
    num_tokens: int


class MarkerProbe:
    """Knows the served model, the connections and the control channel; holds the markers issued so far."""

    def __init__(self, model: ServedModel, pool: WorkerPool, control: WorkerControlClient) -> None:
        self._model = model
        self._pool = pool
        self._control = control
        self._random = random.Random(secrets.randbits(64))
        self._registry = MarkerRegistry(self._random)

    async def run(self, worker: WorkerInfo, num_requests: int = NUM_REQUESTS) -> ProbeReport:
        """A few that miss each other are sent again with longer answers. Never raises for what goes wrong on the
        worker or on the way there."""
        if num_requests > NUM_REQUESTS:
            # Many requests are let in over many steps: the first must not have ended before the last is there.
            return await self._try(worker, num_requests, MAX_TOKENS + 2 * num_requests)
        num_tokens = 0
        for factor in _LONGER:
            # Half of the context is left to the prompt.
            max_tokens = max(MAX_TOKENS, min(factor * MAX_TOKENS, self._model.info.max_model_len // 2))
            report = await self._try(worker, num_requests, max_tokens)
            num_tokens += report.num_tokens
            if report.result is not Result.VOID:
                break
        return replace(report, num_tokens=num_tokens)

    async def _try(self, worker: WorkerInfo, num_requests: int, max_tokens: int) -> ProbeReport:
        marked = self._make(num_requests)
        core = ServingCore([self._model], Dispatcher(PinnedRouter(worker), self._pool))
        try:
            # The first goes ahead: while the worker is in its prefill the others arrive, and enter one step together.
            together = await asyncio.gather(*(self._ask(core, one, max_tokens, salt=None) for one in marked))
            alone = [await self._ask(core, one, max_tokens, salt=secrets.token_hex(8)) for one in marked]
            is_shared = await self._shared_a_step(worker, together)
        except WatchwordError as error:
            return ProbeReport(Result.FAILED, error.message)
        finally:
            await self._forget(worker, core, marked)
        num_tokens = sum(answer.num_tokens for answer in (*together, *alone))
        leak = self._find_leak(marked, together, alone, is_exact=not worker.numerics.startswith("inexact"))
        if leak is not None:
            return ProbeReport(Result.LEAK, leak, num_tokens)
        if not is_shared:
            return ProbeReport(Result.VOID, "the requests did not share a step", num_tokens)
        return ProbeReport(Result.CLEAN, f"{num_requests} requests shared a step", num_tokens)

    def _make(self, num_requests: int) -> list[_Marked]:
        if len(self._registry) > _MAX_MARKERS:
            self._registry = MarkerRegistry(self._random)
        marked = []
        for number in range(num_requests):
            marker = self._registry.issue(f"request {number}")
            messages = _WORDING.build(marker, _WORDING.question(self._random))
            lead = _LEAD if number == 0 and self._model.info.max_model_len >= _MIN_CONTEXT else ""
            turns = tuple({"role": role, "content": lead + content} for role, content in messages)
            marked.append(_Marked(marker, f"user-{number}", turns))
        return marked

    async def _ask(self, core: ServingCore, one: _Marked, max_tokens: int, salt: str | None) -> _Answer:
        given = GenerateInput(
            model=self._model.info.name,
            prompt=ChatInput(one.messages),
            sampling=SamplingInput(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True, logprobs=0),
            caller=CallerFields(user=one.user, cache_salt=salt),
        )
        request_id = new_request_id()
        generation = await core.start(_PRINCIPAL, given, request_id, time.time() + TIMEOUT_S)
        text, bits = "", []
        async with aclosing(generation):
            async for delta in generation:
                text += delta.text
                bits += [(entry.chosen.token_id, entry.chosen.logprob) for entry in delta.logprobs or ()]
        usage = generation.usage
        return _Answer(request_id, text, tuple(bits), usage.prompt_tokens + usage.completion_tokens)

    async def _shared_a_step(self, worker: WorkerInfo, answers: Sequence[_Answer]) -> bool:
        """By the worker's own event log: some step wrote for all of them."""
        request_ids = tuple(answer.request_id for answer in answers)
        events: tuple[TracedEvent, ...] = await self._control.call(worker, Trace(request_ids))
        steps = {request_id: set[int]() for request_id in request_ids}
        for event in events:
            if event.action == "write" and event.request in steps:
                steps[event.request].add(event.step)
        return bool(set.intersection(*steps.values()))

    async def _forget(self, worker: WorkerInfo, core: ServingCore, marked: Sequence[_Marked]) -> None:
        """Gives the blocks back at once: they would push out tenants' blocks, which are older."""
        for one in marked:
            identity = core.identify(_PRINCIPAL, CallerFields(user=one.user), self._model)
            try:
                await self._control.call(worker, PurgeUser(identity.user))
            except WatchwordError:
                return  # the worker is gone, and its blocks with it

    def _find_leak(
        self, marked: Sequence[_Marked], together: Sequence[_Answer], alone: Sequence[_Answer], *, is_exact: bool
    ) -> str | None:
        neighbours = {one.marker for one in marked}
        for number, (one, here, there) in enumerate(zip(marked, together, alone, strict=True)):
            sightings = [
                seen for seen in self._registry.search(here.text, ignore=[one.marker]) if seen.form.is_in_one_piece
            ]
            for seen in sightings:
                # A marker of an earlier probe may be a slip of a model that mangles its own: then it says so alone too.
                if seen.marker in neighbours or not is_exact:
                    return f"request {number} holds the marker of another ({seen.form.value})"
            if is_exact and here.bits != there.bits:
                first = next((i for i, (x, y) in enumerate(zip(here.bits, there.bits, strict=False)) if x != y), None)
                return f"request {number} differs from the same request alone, first at output token {first}"
        return None
