"""Runs one planned round on the step clock: launches what is due, takes a step, lets the consumers read, repeats."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster.api.errors import WatchwordError
from cluster.api.ids import RequestId
from cluster.api.output import RequestOutput
from cluster.api.principal import Principal, Role
from cluster.experiment.observation import Observation, TokenTrace
from cluster.experiment.plan import PlannedRequest
from cluster.experiment.targets.house_rules import TENANT, prompt_ref
from cluster.experiment.targets.step_backend import StepBackend
from cluster.serving.core import PreparedRequest, ServingCore
from cluster.serving.generate_input import CallerFields, ChatInput, GenerateInput, SamplingInput
from cluster.serving.generation import Generation
from cluster.serving.text_delta import TextDelta, TextLogprob

# One trusted back end of one tenant speaks for all users of a run, as in a real deployment behind a chat front end.
_DELEGATE = Principal(TENANT, frozenset({Role.DELEGATE}), "experiment", ())
_MAX_STEPS = 100_000
FAILED_ASSERTION = "failed assertion"


@dataclass(slots=True)
class _Served:
    """A request while it is being answered."""

    planned: PlannedRequest
    request_id: RequestId
    text: str = ""
    ranks: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    was_aborted: bool = False
    generation: Generation | None = None
    task: asyncio.Task[None] | None = None


class RoundDriver:
    """One per round. `make_id` gives every request an id of its own."""

    def __init__(self, core: ServingCore, backend: StepBackend, make_id: Callable[[str], RequestId]) -> None:
        self._core = core
        self._backend = backend
        self._make_id = make_id
        self._model = core.models[0].info.name
        self._served: list[_Served] = []

    async def run(self, requests: Sequence[PlannedRequest]) -> dict[str, Observation]:
        """Raises what the engine raises in a step: a failed assertion is the caller's to judge."""
        prepared = [await self._prepare_or_refuse(request) for request in requests]
        due = sorted(zip(requests, prepared, strict=True), key=lambda pair: pair[0].arrival_step)
        try:
            for step in itertools.count():
                while due and (due[0][0].arrival_step <= step or not self._backend.engine.has_work):
                    await self._launch(*due.pop(0))
                if not due and not self._backend.engine.has_work:
                    break
                assert step < _MAX_STEPS, "a round does not end"
                self._backend.step()
                await self._backend.settle()
        finally:
            await self._end()
        return self.observe_all()

    def observe_all(self) -> dict[str, Observation]:
        """What came of every request launched so far, also when the engine failed in the middle."""
        return {one.planned.name: self._observe(one) for one in self._served}

    async def _launch(self, planned: PlannedRequest, prepared: PreparedRequest | WatchwordError) -> None:
        one = _Served(planned, self._make_id(planned.name))
        self._served.append(one)
        if isinstance(prepared, WatchwordError):
            one.error = prepared.message
            return
        one.task = asyncio.create_task(self._serve(one, prepared))
        await self._backend.settle()

    async def _end(self) -> None:
        """Cancels consumers whose answers never came; all of them when a step failed."""
        tasks = [one.task for one in self._served if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare_or_refuse(self, planned: PlannedRequest) -> PreparedRequest | WatchwordError:
        try:
            return await self.prepare(planned)
        except WatchwordError as error:
            return error

    async def prepare(self, planned: PlannedRequest) -> PreparedRequest:
        given = GenerateInput(
            model=self._model,
            prompt=ChatInput(
                [{"role": role, "content": content} for role, content in planned.messages],
                prompt_ref=None if planned.region is None else prompt_ref(planned.region),
            ),
            sampling=SamplingInput(
                max_tokens=planned.max_tokens,
                temperature=planned.temperature,
                top_p=planned.top_p,
                seed=planned.seed,
                stop=planned.stop,
                logprobs=planned.logprobs,
                n=planned.num_choices,
                ignore_eos=planned.ignore_eos,
            ),
            caller=CallerFields(user=planned.user, session_id=planned.session),
        )
        prepared = await self._core.prepare(_DELEGATE, given)
        if planned.reversed_after is None:
            return prepared
        tokens, count = prepared.prompt.token_ids, planned.reversed_after
        return replace(prepared, prompt=replace(prepared.prompt, token_ids=tokens[:count] + tokens[count:][::-1]))

    async def _serve(self, one: _Served, prepared: PreparedRequest) -> None:
        generation = one.generation = self._core.launch(prepared, one.request_id)
        num_tokens = 0
        try:
            async for delta in generation:
                _take(one, delta)
                num_tokens += len(delta.token_ids)
                limit = one.planned.abort_after_tokens
                if limit is not None and num_tokens >= limit and one.finish_reason is None:
                    one.was_aborted = True
                    break
        except WatchwordError as error:
            one.error = error.message
        except AssertionError as error:
            one.error = f"{FAILED_ASSERTION}: {error}"
        finally:
            await generation.aclose()

    def _observe(self, one: _Served) -> Observation:
        generation = one.generation
        is_lost = one.task is not None and one.task.cancelled()
        made = self._backend.made.get(one.request_id, [])
        return Observation(
            name=one.planned.name,
            text=one.text,
            logprob_texts=tuple(one.ranks),
            error="no answer" if is_lost else one.error,
            finish_reason=one.finish_reason,
            num_cached_tokens=generation.usage.cached_tokens if generation else None,
            num_prompt_tokens=generation.usage.prompt_tokens if generation else None,
            was_aborted=one.was_aborted,
            tokens=_trace(self._backend.delivered.get(one.request_id, [])),
            engine_tokens=_trace(made),
            token_steps=tuple(
                step
                for output, step in zip(made, self._backend.step_ids.get(one.request_id, []), strict=True)
                for delta in output.deltas
                for _ in delta.token_ids
            ),
        )


def _take(one: _Served, delta: TextDelta) -> None:
    one.text += delta.text
    if delta.finish_reason is not None:
        one.finish_reason = delta.finish_reason.value
    for logprob in delta.logprobs or ():
        _take_logprob(one, logprob)


def _take_logprob(one: _Served, logprob: TextLogprob) -> None:
    ranked = [logprob.chosen.text, *(token.text for token in logprob.top)]
    one.ranks.extend([""] * (len(ranked) - len(one.ranks)))
    for rank, text in enumerate(ranked):
        one.ranks[rank] += text


def _trace(outputs: list[RequestOutput]) -> tuple[TokenTrace, ...]:
    traces = []
    for output in outputs:
        for delta in output.deltas:
            logprobs = delta.logprobs or (None,) * len(delta.token_ids)
            for token_id, logprob in zip(delta.token_ids, logprobs, strict=True):
                trace = TokenTrace(token_id, logprob.logprob, logprob.top) if logprob else TokenTrace(token_id)
                traces.append(trace)
    return tuple(traces)
