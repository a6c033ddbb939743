"""What chat and text replies share: usage, finish reasons and logprobs in OpenAI's two formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cluster.api.output import FinishReason
from cluster.openai.json_text import to_json
from cluster.serving.text_delta import TextLogprob, TokenText, Usage

# JSON has no -inf; peers send this floor, far below any real log probability.
_MIN_LOGPROB = -9999.0


def usage_json(usage: Usage) -> dict[str, Any]:
    """`cached_tokens` is always there: it is how a caller sees what was shared."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def event_head(fields: dict[str, Any]) -> str:
    """The start of a chunk's event up to its first choice; followed by choices and `event_tail`."""
    return f'data: {to_json(fields)[:-1]},"choices":['


def event_tail(usage: Usage | None) -> str:
    return f'],"usage":{to_json(None if usage is None else usage_json(usage))}}}\n\n'


def error_event(error: dict[str, Any]) -> str:
    return f"data: {to_json({'error': error})}\n\n"


def finish_json(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def chat_logprobs(logprobs: Sequence[TextLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {"content": [_chat_entry(item) for item in logprobs], "refusal": None}


def _chat_entry(item: TextLogprob) -> dict[str, Any]:
    return {**_chat_token(item.chosen), "top_logprobs": [_chat_token(token) for token in item.top]}


def _chat_token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def text_logprobs(logprobs: Sequence[TextLogprob] | None) -> dict[str, Any] | None:
    """The older format of /v1/completions; offsets in characters of the choice's text."""
    if logprobs is None:
        return None
    return {
        "tokens": [_text_token(item.chosen) for item in logprobs],
        "token_logprobs": [_finite(item.chosen.logprob) for item in logprobs],
        "top_logprobs": [
            {_text_token(token): _finite(token.logprob) for token in item.top} or None for item in logprobs
        ],
        "text_offset": [item.text_offset for item in logprobs],
    }


def _text_token(token: TokenText) -> str:
    """This format has no bytes, so a part of a character is spelled out; else all such tokens would look the same."""
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB
