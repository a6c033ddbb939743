"""From a request's messages or text to token ids and the scope of each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cluster.api.errors import InvalidRequestError, UnsupportedError
from cluster.api.prompt import BuiltPrompt, CallerIdentity, PromptRef
from cluster.api.scope import ScopeSpan
from cluster.prompts.chat_template import ChatTemplate, Clock
from cluster.prompts.control_tokens import choose_mark
from cluster.prompts.messages import checked_unicode, normalize_messages
from cluster.prompts.tokenizer import Tokenizer


class PromptBuilder:
    """Renders, tokenizes and scopes. Safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, clock: Clock = datetime.now) -> None:
        self.tokenizer = tokenizer
        self.chat_template = (
            ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, clock) if tokenizer.chat_template else None
        )

    def chat(
        self,
        identity: CallerIdentity,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt_ref: PromptRef | None = None,
        add_generation_prompt: bool = True,
    ) -> BuiltPrompt:
        """Raises InvalidRequestError (with the field at fault), NotFoundError for an unknown prompt id."""
        if prompt_ref is not None:
            raise UnsupportedError("prompt templates are not available on this server", param="prompt")
        turns = normalize_messages(messages)
        if not turns:
            raise InvalidRequestError("messages must hold at least one message", param="messages")
        return _private(identity, self._render(turns, add_generation_prompt))

    def text(self, identity: CallerIdentity, text: str) -> BuiltPrompt:
        """A bare prompt: control-token look-alikes are plain text; send token ids to place control tokens."""
        encoded = self.tokenizer.encode_plain(checked_unicode(text, "prompt"), add_special_tokens=True)
        return self.tokens(identity, encoded.token_ids)

    def tokens(self, identity: CallerIdentity, token_ids: Sequence[int]) -> BuiltPrompt:
        """Token ids as the caller gave them."""
        if not token_ids:
            raise InvalidRequestError("prompt must not be empty", param="prompt")
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError("prompt must hold integers only", param="prompt")
            if not 0 <= token_id < self.tokenizer.vocab_size:
                raise InvalidRequestError(
                    f"token id {token_id} is outside 0…{self.tokenizer.vocab_size - 1}", param="prompt"
                )
        return _private(identity, tuple(token_ids))

    def _render(self, turns: list[dict[str, Any]], add_generation_prompt: bool) -> tuple[int, ...]:
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        mark = choose_mark(turns)
        controls = self.tokenizer.control_tokens
        escaped = [{**controls.escape_tree(turn, mark), "role": turn["role"]} for turn in turns]
        rendered = self.chat_template.render(escaped, add_generation_prompt=add_generation_prompt)
        return self.tokenizer.encode_rendered(rendered, mark).token_ids


def _private(identity: CallerIdentity, token_ids: tuple[int, ...]) -> BuiltPrompt:
    return BuiltPrompt(token_ids, (ScopeSpan(None, identity.private),))
