"""POST /v1/chat/completions: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.api.errors import InvalidRequestError
from cluster.openai.messages import parse_messages
from cluster.openai.unbuilt import CHAT, refuse_unbuilt
from cluster.openai.wire import GenerationWire, PromptRefWire, parse_body
from cluster.serving.generate_input import ChatInput, GenerateInput


class ChatCompletionRequest(GenerationWire):
    messages: Any = None
    prompt: PromptRefWire | None = None  # a registered prompt; its messages come before `messages`
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ChatCompletionRequest:
        refuse_unbuilt(body, CHAT)
        wire = parse_body(cls, body)
        wire.check_stream_options()
        return wire

    def to_input(self, header_user: str | None) -> GenerateInput:
        return GenerateInput(
            model=self.model,
            prompt=self.chat_input(),
            sampling=self.sampling_input(max_tokens=self._max_tokens(), logprobs=self._num_logprobs()),
            caller=self.caller_fields(header_user),
            share=self.asked_share,
            skip_special_tokens=self.skip_special_tokens is not False,
        )

    def chat_input(self) -> ChatInput:
        if self.messages is None and self.prompt is None:
            raise InvalidRequestError("messages is required", param="messages")
        messages = [] if self.messages is None else self.messages
        return ChatInput(
            messages=parse_messages(messages, param="messages", may_be_empty=self.prompt is not None),
            prompt_ref=None if self.prompt is None else self.prompt.to_ref(),
        )

    def _max_tokens(self) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if None not in (old, new) and old != new:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens differ; send one of them", param="max_tokens"
            )
        return new if new is not None else old

    def _num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequestError("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        return None
