"""POST /v1/completions: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.api.errors import InvalidRequestError
from cluster.openai.messages import parse_prompts
from cluster.openai.unbuilt import COMPLETION, refuse_unbuilt
from cluster.openai.wire import GenerationWire, parse_body
from cluster.serving.generate_input import GenerateInput, TextInput, TokensInput


class CompletionRequest(GenerationWire):
    prompt: Any = None
    logprobs: int | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> CompletionRequest:
        refuse_unbuilt(body, COMPLETION)
        wire = parse_body(cls, body)
        wire.check_stream_options()
        return wire

    def to_inputs(self, header_user: str | None, max_prompts: int) -> list[GenerateInput]:
        """One for each prompt."""
        prompts = parse_prompts(self.prompt)
        if len(prompts) > max_prompts:
            raise InvalidRequestError(
                f"prompt has {len(prompts)} entries, at most {max_prompts} are allowed", param="prompt"
            )
        if len(prompts) * max(self.n or 1, 1) > max_prompts:
            raise InvalidRequestError(
                f"prompt has {len(prompts)} entries and n is {self.n}, at most {max_prompts} answers are allowed",
                param="n",
            )
        sampling = self.sampling_input(max_tokens=self.max_tokens, logprobs=self.logprobs)
        caller = self.caller_fields(header_user)
        return [
            GenerateInput(
                model=self.model,
                prompt=TextInput(prompt) if isinstance(prompt, str) else TokensInput(prompt),
                sampling=sampling,
                caller=caller,
                share=self.asked_share,
                skip_special_tokens=self.skip_special_tokens is not False,
            )
            for prompt in prompts
        ]
