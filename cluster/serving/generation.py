"""One running request as its caller sees it: an async iterator of text deltas that can be closed at any time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator

from cluster.api.errors import DeadlineExceededError, InternalError, RequestAbortedError, WatchwordError
from cluster.api.output import ChoiceDelta, FinishReason, RequestOutput
from cluster.api.request import Request
from cluster.backend import Placement
from cluster.serving.choice_text import ChoiceText
from cluster.serving.observer import GenerationObserver
from cluster.serving.text_delta import TextDelta, Usage
from cluster.serving.token_table import TokenTable


class Generation:
    """Iterate, or `aclose()` to abort; both from the same task. Raises WatchwordError while iterating.

    Closed by itself at the end, on an error, and when every choice met a stop string before the engine stopped.
    """

    def __init__(
        self,
        request: Request,
        outputs: AsyncGenerator[RequestOutput, None],
        placement: Placement,
        table: TokenTable,
        observer: GenerationObserver,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.model = request.model
        self.prompt_token_ids = request.prompt_token_ids
        self.seed = sampling.seed
        self.num_choices = sampling.n
        self.placement = placement
        self._deadline_unix_s = request.deadline_unix_s
        self._outputs = outputs
        self._observer = observer
        self._choices = [
            ChoiceText(index, table, sampling.stop, sampling.min_tokens, skip_special_tokens)
            for index in range(sampling.n)
        ]
        self._ready: deque[TextDelta] = deque()
        self._cached_tokens = 0
        self._last_reason = FinishReason.STOP
        self._is_closed = False
        self._started_s = self._last_token_s = time.monotonic()
        self._has_token = False
        self._has_started = False

    @property
    def usage(self) -> Usage:
        """Counts so far; final once the iterator has ended."""
        completion = sum(choice.num_tokens for choice in self._choices)
        return Usage(len(self.prompt_token_ids), completion, self._cached_tokens)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TextDelta:
        while not self._ready:
            if self._is_closed:
                raise StopAsyncIteration
            await self._step()
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Aborts the request everywhere, unless it has ended. Idempotent."""
        await self._close("abort")

    async def _step(self) -> None:
        if not self._has_started:
            # Not in the constructor: a generation that nobody ever iterates has no end to report either.
            self._has_started = True
            self._observer.started(self.model)
        try:
            self._take(await self._next_output())
        except WatchwordError as error:
            await self._close(error.code)
            raise
        except BaseException as error:
            # A cancelled consumer leaves here too: the abort must go out before the cancellation goes on.
            await self._close("abort" if isinstance(error, asyncio.CancelledError) else InternalError.default_code)
            raise
        if all(choice.is_finished for choice in self._choices):
            await self._close(self._last_reason.value)

    async def _next_output(self) -> RequestOutput:
        try:
            if self._deadline_unix_s is None:
                return await anext(self._outputs)
            async with asyncio.timeout(self._deadline_unix_s - time.time()):
                return await anext(self._outputs)
        except TimeoutError:
            raise DeadlineExceededError("the request ran past its deadline") from None
        except StopAsyncIteration:
            raise InternalError("the answer ended before it was finished") from None

    def _take(self, output: RequestOutput) -> None:
        assert output.request_id == self.request_id, "an output of another request"
        if output.error is not None:
            raise output.error
        if output.num_cached_tokens is not None:
            self._cached_tokens = output.num_cached_tokens
        for delta in output.deltas:
            self._take_delta(delta)
        if output.finished and not all(choice.is_finished for choice in self._choices):
            raise InternalError("the answer ended before all of its choices did")

    def _take_delta(self, delta: ChoiceDelta) -> None:
        if delta.finish_reason is FinishReason.ABORT and not self._choices[delta.index].is_finished:
            raise RequestAbortedError("the request was aborted")
        if delta.token_ids:
            self._note_time()
        told = self._choices[delta.index].feed(delta)
        if told is not None:
            self._ready.append(told)
            self._last_reason = told.finish_reason or self._last_reason

    def _note_time(self) -> None:
        now = time.monotonic()
        if self._has_token:
            self._observer.next_tokens(self.model, now - self._last_token_s)
        else:
            self._has_token = True
            self._observer.first_token(self.model, now - self._started_s)
        self._last_token_s = now

    async def _close(self, outcome: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._has_started:
            self._observer.ended(self.model, outcome, time.monotonic() - self._started_s, self.usage)
        await self._outputs.aclose()  # runs the backend's `finally`, which aborts the request on its worker
