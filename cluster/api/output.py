"""What a worker sends back: increments, never totals, each for one choice of one request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.api.errors import WatchwordError
from cluster.api.ids import RequestId


class FinishReason(Enum):
    STOP = "stop"  # end-of-sequence, stop token or stop string
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of probabilities after temperature-free softmax of the adjusted logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # most likely first; empty when only the sampled token was asked for


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New tokens of one choice. `logprobs` is aligned with `token_ids`, or None when not asked for."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended the choice; it is the last of token_ids


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One step's news of one request. The first one carries `num_cached_tokens`; `error` ends the request."""

    request_id: RequestId
    deltas: tuple[ChoiceDelta, ...] = ()
    num_cached_tokens: int | None = None  # prompt tokens taken from the prefix cache, full blocks only
    finished: bool = False  # all choices are done
    error: WatchwordError | None = None
