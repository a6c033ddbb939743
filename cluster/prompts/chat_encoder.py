"""Messages to token ids through the model's chat template, with the callers' look-alikes kept as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cluster.api.errors import InvalidRequestError
from cluster.prompts.chat_template import ChatTemplate, Clock
from cluster.prompts.control_tokens import choose_mark
from cluster.prompts.tokenizer import Encoded, Tokenizer


class ChatEncoder:
    """One tokenizer and one chat template. All text in messages counts as a caller's, registered templates' too."""

    def __init__(self, tokenizer: Tokenizer, clock: Clock = datetime.now) -> None:
        self.tokenizer = tokenizer
        self.clock = clock
        self.template = (
            ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, clock) if tokenizer.chat_template else None
        )

    def encode(
        self,
        turns: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> Encoded:
        """`turns` have been normalized. Raises InvalidRequestError when the chat template refuses them."""
        return self.tokenizer.encode_rendered(*self.render(turns, tools, add_generation_prompt))

    def render(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> tuple[str, str]:
        """The rendered text, and the mark that breaks look-alikes in it."""
        if self.template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        mark = choose_mark(turns)
        controls = self.tokenizer.control_tokens
        escaped = [{**controls.escape_tree(turn, mark), "role": turn["role"]} for turn in turns]
        return self.template.render(escaped, tools=tools, add_generation_prompt=add_generation_prompt), mark
