"""SamplingInput -> SamplingParams: ranges, defaults and the seed. One place for both transports.

Every refusal names the field, the value and the allowed range.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

from cluster.api.errors import ContextLengthError, InvalidRequestError
from cluster.api.sampling import SamplingParams
from cluster.backend import ModelInfo
from cluster.serving.generate_input import SamplingInput

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Bounds that protect the service rather than the mathematics."""

    max_n: int = 128
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 1024
    max_logprobs: int = 20
    max_logit_bias: int = 1024

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")


def decide_sampling(
    given: SamplingInput, num_prompt_tokens: int, model: ModelInfo, limits: SamplingLimits
) -> SamplingParams:
    """Raises InvalidRequestError, or ContextLengthError when the prompt leaves no room for the output."""
    max_tokens = _max_tokens(given, num_prompt_tokens, model)
    min_tokens = _integer("min_tokens", given.min_tokens, 0, 0, max_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=_seed(given.seed),
        temperature=_number("temperature", given.temperature, 1.0, 0.0, 2.0),
        top_p=_number("top_p", given.top_p, 1.0, 0.0, 1.0, is_low_open=True),
        top_k=_top_k(given.top_k, model.vocab_size),
        min_p=_number("min_p", given.min_p, 0.0, 0.0, 1.0),
        n=_integer("n", given.n, 1, 1, limits.max_n),
        stop=_stop_strings(given.stop, limits),
        stop_token_ids=_stop_token_ids(given.stop_token_ids, model.vocab_size, limits),
        ignore_eos=bool(given.ignore_eos),
        logprobs=None if given.logprobs is None else _integer("logprobs", given.logprobs, 0, 0, limits.max_logprobs),
        presence_penalty=_number("presence_penalty", given.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", given.frequency_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=_number("repetition_penalty", given.repetition_penalty, 1.0, 0.0, 10.0, is_low_open=True),
        logit_bias=_logit_bias(given, model.vocab_size, limits),
    )


def check_prompt_length(num_prompt_tokens: int, model: ModelInfo) -> None:
    """A prompt needs a token to start from and must leave room for one more."""
    if num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt is empty: it must have at least 1 token", param="prompt")
    if num_prompt_tokens >= model.max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens; the model's context is {model.max_model_len} tokens, "
            "at least 1 of them for the answer",
            param="messages",
        )


def _max_tokens(given: SamplingInput, num_prompt_tokens: int, model: ModelInfo) -> int:
    room = model.max_model_len - num_prompt_tokens
    if given.max_tokens is None:
        return room
    wanted = given.max_tokens
    if wanted < 1:
        raise InvalidRequestError(f"max_tokens is {wanted}, must be at least 1", param="max_tokens")
    if wanted > room:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {_short(wanted)}; together they must not "
            f"exceed the model's context of {model.max_model_len} tokens",
            param="max_tokens",
        )
    return wanted


def _seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(63)
    return _integer("seed", seed, 0, INT64_MIN, INT64_MAX)


def _top_k(top_k: int | None, vocab_size: int) -> int:
    # -1 is how several peers write "off"; above the vocabulary there is nothing left to cut.
    value = _integer("top_k", top_k, 0, -1, INT64_MAX)
    return 0 if value == -1 else min(value, vocab_size)


def _number(
    name: str, value: float | None, default: float, low: float, high: float, *, is_low_open: bool = False
) -> float:
    if value is None:
        return default
    inside = math.isfinite(value) and (low < value if is_low_open else low <= value) and value <= high
    if not inside:
        border = "(" if is_low_open else "["
        raise InvalidRequestError(f"{name} is {_short(value)}, must be in {border}{low}, {high}]", param=name)
    return float(value)


def _integer(name: str, value: int | None, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {_short(value)}, must be in [{low}, {high}]", param=name)
    return value


def _stop_strings(stop: object, limits: SamplingLimits) -> tuple[str, ...]:
    assert isinstance(stop, list | tuple)
    if len(stop) > limits.max_stop_strings:
        raise InvalidRequestError(
            f"stop has {len(stop)} strings, at most {limits.max_stop_strings} are allowed", param="stop"
        )
    for text in stop:
        if not 1 <= len(text) <= limits.max_stop_chars:
            raise InvalidRequestError(
                f"a stop string has {len(text)} characters, must have 1 to {limits.max_stop_chars}", param="stop"
            )
    return tuple(dict.fromkeys(stop))


def _stop_token_ids(token_ids: object, vocab_size: int, limits: SamplingLimits) -> tuple[int, ...]:
    assert isinstance(token_ids, list | tuple)
    if len(token_ids) > limits.max_stop_token_ids:
        raise InvalidRequestError(
            f"stop_token_ids has {len(token_ids)} entries, at most {limits.max_stop_token_ids} are allowed",
            param="stop_token_ids",
        )
    for token_id in token_ids:
        _integer("stop_token_ids", token_id, 0, 0, vocab_size - 1)
    return tuple(dict.fromkeys(token_ids))


def _logit_bias(given: SamplingInput, vocab_size: int, limits: SamplingLimits) -> tuple[tuple[int, float], ...]:
    if len(given.logit_bias) > limits.max_logit_bias:
        raise InvalidRequestError(
            f"logit_bias has {len(given.logit_bias)} entries, at most {limits.max_logit_bias} are allowed",
            param="logit_bias",
        )
    pairs = []
    for token_id, bias in given.logit_bias.items():
        _integer("logit_bias", token_id, 0, 0, vocab_size - 1)
        pairs.append((token_id, _number("logit_bias", bias, 0.0, -100.0, 100.0)))
    return tuple(sorted(pairs))


def _short(value: float) -> str:
    """A number for a message; an integer of thousands of digits is not worth echoing."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return "an integer of more than 30 digits"
    return str(value)
