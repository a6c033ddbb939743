"""The gRPC messages <-> what the serving core speaks. Knows no transport: it takes messages and returns messages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.message import Message

from cluster.api.errors import InvalidRequestError
from cluster.api.output import FinishReason
from cluster.api.prompt import PromptRef
from cluster.backend import ModelInfo
from cluster.prompts.policy import Share, parse_choice
from cluster.proto.watchword.v1 import generation_pb2 as pb
from cluster.serving.generate_input import (
    CallerFields,
    ChatInput,
    GenerateInput,
    PromptInput,
    SamplingInput,
    TextInput,
    TokensInput,
)
from cluster.serving.text_delta import TextDelta, TextLogprob, TokenText, Usage

# Floats of this size and beyond no longer tell neighbouring integers apart.
_MAX_EXACT_INTEGER = 2**53

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


def read_generate(request: pb.GenerateRequest, header_user: str | None) -> GenerateInput:
    """Raises InvalidRequestError for what the message format allows and the API does not."""
    return GenerateInput(
        model=request.model,
        prompt=read_prompt(request.prompt),
        sampling=_read_sampling(request.sampling),
        caller=replace(
            read_caller(request, header_user),
            cache_salt=_given(request, "cache_salt"),
            session_id=_given(request, "session_id"),
            prompt_cache_key=_given(request, "prompt_cache_key"),
        ),
        share=parse_choice(Share, request.share, "share") if request.HasField("share") else None,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
    )


def read_caller(request: pb.GenerateRequest | pb.TokenizeRequest, header_user: str | None) -> CallerFields:
    """Who is meant; what narrows the sharing of blocks is added by read_generate."""
    return CallerFields(
        user=_given(request, "user"),
        safety_identifier=_given(request, "safety_identifier"),
        header_user=header_user,
    )


def read_prompt(prompt: pb.Prompt) -> PromptInput:
    kind = prompt.WhichOneof("input")
    if kind == "chat":
        return _read_chat(prompt.chat)
    if kind == "text":
        add_special_tokens = prompt.add_special_tokens if prompt.HasField("add_special_tokens") else True
        return TextInput(prompt.text, add_special_tokens=add_special_tokens)
    if kind == "token_ids":
        return TokensInput(tuple(prompt.token_ids.ids))
    raise InvalidRequestError("prompt is not set: give one of chat, text and token_ids", param="prompt")


def write_delta(delta: TextDelta) -> pb.ChoiceDelta:
    message = pb.ChoiceDelta(index=delta.index, text=delta.text, token_ids=delta.token_ids)
    if delta.logprobs is not None:
        message.logprobs.extend(_write_logprob(logprob) for logprob in delta.logprobs)
    if delta.finish_reason is not None:
        message.finish_reason = _FINISH_REASONS[delta.finish_reason]
    if isinstance(delta.stop_reason, str):
        message.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason
    return message


def write_usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def write_model(model: ModelInfo) -> pb.GetModelResponse:
    return pb.GetModelResponse(
        name=model.name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_token_ids),
        adapters=model.adapters,
    )


def _read_chat(chat: pb.Chat) -> ChatInput:
    prompt_ref = None
    if chat.HasField("prompt"):
        variables = _read_struct(chat.prompt.variables, "prompt.variables")
        prompt_ref = PromptRef(chat.prompt.id, _given(chat.prompt, "version"), variables)
    return ChatInput(
        messages=[_read_message(message) for message in chat.messages],
        prompt_ref=prompt_ref,
        template_kwargs=_read_struct(chat.chat_template_kwargs, "chat_template_kwargs"),
    )


def _read_message(message: pb.ChatMessage) -> dict[str, Any]:
    read = {"role": message.role, "content": message.content}
    if message.HasField("name"):
        read["name"] = message.name
    return read


def _read_sampling(sampling: pb.SamplingParams) -> SamplingInput:
    """A field that is not set stays None: zero is a value, not an absence."""
    return SamplingInput(
        max_tokens=_given(sampling, "max_tokens"),
        min_tokens=_given(sampling, "min_tokens"),
        temperature=_given(sampling, "temperature"),
        top_p=_given(sampling, "top_p"),
        top_k=_given(sampling, "top_k"),
        min_p=_given(sampling, "min_p"),
        n=_given(sampling, "n"),
        seed=_given(sampling, "seed"),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=_given(sampling, "ignore_eos"),
        logprobs=_given(sampling, "logprobs"),
        presence_penalty=_given(sampling, "presence_penalty"),
        frequency_penalty=_given(sampling, "frequency_penalty"),
        repetition_penalty=_given(sampling, "repetition_penalty"),
        logit_bias=dict(sampling.logit_bias),
    )


def _given(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _read_struct(struct: struct_pb2.Struct, param: str) -> dict[str, Any]:
    return {name: _read_value(value, param) for name, value in struct.fields.items()}


def _read_value(value: struct_pb2.Value, param: str) -> Any:
    kind = value.WhichOneof("kind")
    if kind is None or kind == "null_value":
        return None
    if kind == "struct_value":
        return _read_struct(value.struct_value, param)
    if kind == "list_value":
        return [_read_value(item, param) for item in value.list_value.values]
    if kind == "number_value":
        return _read_number(value.number_value, param)
    return getattr(value, kind)


def _read_number(number: float, param: str) -> int | float:
    """A Struct has no integers; 5.0 means 5, as it does in the JSON mapping of a Struct."""
    if not math.isfinite(number):
        raise InvalidRequestError(f"{param} holds the number {number}, must be finite", param=param)
    return int(number) if number.is_integer() and abs(number) < _MAX_EXACT_INTEGER else number


def _write_logprob(logprob: TextLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(chosen=_write_token(logprob.chosen), top=[_write_token(token) for token in logprob.top])


def _write_token(token: TokenText) -> pb.TokenText:
    return pb.TokenText(token_id=token.token_id, text=token.text, raw=token.raw, logprob=token.logprob)
