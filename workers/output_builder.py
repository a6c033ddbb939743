"""Collects one step's news, request by request, in the form that crosses the process border."""

from __future__ import annotations

from cluster.api.errors import WatchwordError
from cluster.api.output import ChoiceDelta, FinishReason, RequestOutput, TokenLogprob
from workers.live_request import LiveRequest
from workers.sequence import Sequence
from workers.step import SampledToken


class OutputBuilder:
    """Filled during a step, emptied by `take`."""

    def __init__(self) -> None:
        self._deltas: dict[int, tuple[LiveRequest, list[ChoiceDelta]]] = {}  # by arrival
        self._failed: list[RequestOutput] = []

    @property
    def has_news(self) -> bool:
        return bool(self._deltas or self._failed)

    def add_token(self, live: LiveRequest, seq: Sequence, sampled: SampledToken, stop_token_id: int | None) -> None:
        logprobs = None
        if seq.request.sampling.logprobs is not None:
            assert sampled.logprob is not None, "the runner left out a logprob that was asked for"
            logprobs = (TokenLogprob(sampled.token_id, sampled.logprob, sampled.top),)
        self._add(live, ChoiceDelta(seq.choice, (sampled.token_id,), logprobs, seq.finish_reason, stop_token_id))

    def add_finish(self, live: LiveRequest, choice: int, reason: FinishReason) -> None:
        """A choice that ends without a new token."""
        self._add(live, ChoiceDelta(choice, (), finish_reason=reason))

    def add_error(self, live: LiveRequest, error: WatchwordError) -> None:
        """Ends the request; what it produced in this step is dropped."""
        self._deltas.pop(live.arrival, None)
        self._failed.append(RequestOutput(live.request.request_id, finished=True, error=error))

    def take(self) -> list[RequestOutput]:
        """In order of arrival within the step, failures first."""
        outputs = self._failed
        for live, deltas in self._deltas.values():
            num_cached = live.take_num_cached_tokens()
            outputs.append(RequestOutput(live.request.request_id, tuple(deltas), num_cached, live.is_finished))
        self._deltas, self._failed = {}, []
        return outputs

    def _add(self, live: LiveRequest, delta: ChoiceDelta) -> None:
        self._deltas.setdefault(live.arrival, (live, []))[1].append(delta)
