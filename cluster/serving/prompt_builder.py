"""The seam to prompt building: rendering, tokenizing and scoping happen behind it (cluster/prompts)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cluster.api.prompt import BuiltPrompt, CallerIdentity, PromptRef


class PromptBuilder(Protocol):
    """All three raise InvalidRequestError or NotFoundError for what the caller caused, and may run on any thread."""

    def chat(
        self,
        identity: CallerIdentity,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt_ref: PromptRef | None = None,
    ) -> BuiltPrompt: ...

    def text(self, identity: CallerIdentity, text: str, *, add_special_tokens: bool = True) -> BuiltPrompt: ...

    def tokens(self, identity: CallerIdentity, token_ids: Sequence[int]) -> BuiltPrompt: ...
