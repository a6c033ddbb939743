"""Can this engine ever serve this request? Asked once, on arrival; every refusal names the value and the range."""

from __future__ import annotations

from cluster.api.errors import ContextLengthError, InvalidRequestError
from cluster.api.request import Request
from cluster.api.scope import Scope, ScopeFields
from workers.config import EngineConfig


def validate_request(request: Request, config: EngineConfig, vocab_size: int) -> None:
    """Raises InvalidRequestError or ContextLengthError."""
    sampling = request.sampling
    num_prompt = request.num_prompt_tokens
    _require(num_prompt >= 1, "the prompt has no tokens; at least 1 is needed", "prompt")
    _require(sampling.max_tokens >= 1, f"max_tokens is {sampling.max_tokens}, must be at least 1", "max_tokens")
    _require(sampling.n >= 1, f"n is {sampling.n}, must be at least 1", "n")
    low, high = min(request.prompt_token_ids), max(request.prompt_token_ids)
    _require(low >= 0 and high < vocab_size, f"token ids must be from 0 to {vocab_size - 1}", "prompt")
    _validate_length(num_prompt + sampling.max_tokens, config)
    num_full = num_prompt // config.block_size
    _require(
        len(request.block_keys) == num_full,
        f"{len(request.block_keys)} block keys for {num_full} full blocks of {config.block_size} tokens",
        "block_keys",
    )
    _validate_spans(request)
    _require(
        len(request.emitted) in (0, sampling.n), f"emitted has {len(request.emitted)} choices, n is {sampling.n}", "n"
    )


def _validate_length(num_tokens: int, config: EngineConfig) -> None:
    if num_tokens > config.max_model_len:
        raise ContextLengthError(
            f"prompt and max_tokens come to {num_tokens} tokens, the limit is {config.max_model_len}",
            param="max_tokens",
        )
    num_usable = (config.num_blocks - config.max_pinned_blocks) * config.block_size
    if num_tokens > num_usable:  # alone in the pool it must be able to finish, or it would preempt itself for ever
        raise ContextLengthError(
            f"prompt and max_tokens come to {num_tokens} tokens, the KV pool holds {num_usable}", param="max_tokens"
        )


def _validate_spans(request: Request) -> None:
    spans = request.spans
    is_bounded = [span.num_blocks is not None for span in spans]
    _require(bool(spans) and is_bounded == [True] * (len(spans) - 1) + [False], "only the last span is open", "spans")
    _require(all((span.num_blocks or 0) >= 0 for span in spans), "a span has a negative number of blocks", "spans")
    scopes = [span.fields.scope for span in spans]
    _require(scopes == sorted(scopes), "scopes widen along the prompt", "spans")
    for span in spans:
        _require(_is_own(span.fields, request), "a span names another principal than the request", "spans")


def _is_own(fields: ScopeFields, request: Request) -> bool:
    """Whether the fields name no one but the request's own tenant and user, and as much as their scope demands."""
    is_tenant_right = fields.tenant == request.tenant_hash or (fields.tenant is None and fields.scope is Scope.PUBLIC)
    is_user_right = fields.user == request.user_hash or (fields.user is None and fields.scope < Scope.USER)
    return is_tenant_right and is_user_right


def _require(condition: bool, message: str, param: str) -> None:
    if not condition:
        raise InvalidRequestError(message, param=param)
