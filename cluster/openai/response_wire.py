"""POST /v1/responses: the request. Stateless: nothing is stored, so nothing can be referred to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.api.errors import InvalidRequestError, UnsupportedError
from cluster.openai.messages import parse_messages
from cluster.openai.unbuilt import RESPONSES, refuse_unbuilt
from cluster.openai.wire import GenerationWire, PromptRefWire, json_name, parse_body
from cluster.serving.generate_input import ChatInput, GenerateInput


class ResponsesRequest(GenerationWire):
    input: Any = None
    instructions: str | None = None
    prompt: PromptRefWire | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ResponsesRequest:
        refuse_unbuilt(body, RESPONSES)
        wire = parse_body(cls, body)
        if wire.n not in (None, 1):
            raise InvalidRequestError(f"n is {json_name(wire.n)}, a response has exactly 1 answer", param="n")
        if wire.top_logprobs:
            raise UnsupportedError("top_logprobs is not supported in responses yet", param="top_logprobs")
        return wire

    def to_input(self, header_user: str | None) -> GenerateInput:
        return GenerateInput(
            model=self.model,
            prompt=ChatInput(self._messages(), None if self.prompt is None else self.prompt.to_ref()),
            sampling=self.sampling_input(max_tokens=self.max_output_tokens, logprobs=None),
            caller=self.caller_fields(header_user),
            share=self.asked_share,
            skip_special_tokens=self.skip_special_tokens is not False,
        )

    def _messages(self) -> list[dict[str, Any]]:
        """Instructions are a system message in front."""
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if self.input is None:
            if self.prompt is None:
                raise InvalidRequestError("input is required", param="input")
            return messages
        return messages + parse_messages(
            _only_messages(self.input), param="input", may_be_empty=self.prompt is not None
        )


def _only_messages(items: object) -> object:
    """An input list may hold other things than messages: tool calls, references, reasoning. None of them is built."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind != "message":
            shown = repr(kind)[:40] if isinstance(kind, str) else json_name(kind)
            raise UnsupportedError(f"input[{index}].type {shown} is not supported yet", param=f"input[{index}].type")
    return items
