"""POST /tokenize and /detokenize: the requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.api.errors import InvalidRequestError
from cluster.openai.messages import parse_messages
from cluster.openai.unbuilt import TOKENIZE, refuse_unbuilt
from cluster.openai.wire import PromptRefWire, Wire, parse_body
from cluster.serving.generate_input import CallerFields, ChatInput, PromptInput, TextInput


class TokenizeRequest(Wire):
    model: str
    prompt: Any = None  # text, or with `messages` a registered prompt
    messages: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> TokenizeRequest:
        refuse_unbuilt(body, TOKENIZE)
        return parse_body(cls, body)

    def prompt_input(self) -> PromptInput:
        if isinstance(self.prompt, str) and self.messages is None:
            return TextInput(self.prompt, add_special_tokens=self.add_special_tokens is not False)
        if self.messages is None:
            raise InvalidRequestError("prompt (a string) or messages is required", param="prompt")
        reference = None
        if self.prompt is not None:
            reference = parse_body(PromptRefWire, self.prompt).to_ref() if isinstance(self.prompt, dict) else None
            if reference is None:
                raise InvalidRequestError("send either prompt or messages", param="prompt")
        return ChatInput(parse_messages(self.messages, param="messages"), reference)

    def caller_fields(self, header_user: str | None) -> CallerFields:
        return CallerFields(user=self.user, safety_identifier=self.safety_identifier, header_user=header_user)


class DetokenizeRequest(Wire):
    model: str
    tokens: list[int]

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> DetokenizeRequest:
        return parse_body(cls, body)
