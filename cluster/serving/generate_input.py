"""What a caller asked for, before any default is filled in. Both transports build it; nothing in it is trusted yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.api.prompt import PromptRef
from cluster.prompts.policy import Share


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Messages in template form: {"role", "content", …}. A registered prompt's messages come before them."""

    messages: Sequence[Mapping[str, Any]]
    prompt_ref: PromptRef | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextInput:
    """`add_special_tokens`: what the tokenizer puts around a text of its own accord (a begin token, say)."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokensInput:
    token_ids: Sequence[int]


PromptInput = ChatInput | TextInput | TokensInput


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """As SamplingParams, but None means "not given"."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallerFields:
    """The narrowing fields of a request. `header_user` comes from a trusted proxy only (cluster/auth/proxy.py)."""

    user: str | None = None
    safety_identifier: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    header_user: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """`share` narrows how far the prompt's blocks may be shared; None leaves it to the operator and the template."""

    model: str
    prompt: PromptInput
    sampling: SamplingInput = SamplingInput()
    caller: CallerFields = CallerFields()
    share: Share | None = None
    skip_special_tokens: bool = True
