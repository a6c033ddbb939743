"""The seam to prompt building: rendering, tokenizing and scoping happen behind it (cluster/prompts)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cluster.api.prompt import BuiltPrompt, CallerIdentity, PromptRef
from cluster.prompts.policy import Share


class PromptBuilder(Protocol):
    """All three raise InvalidRequestError or NotFoundError for what the caller caused, and may run on any thread.

    `share` can only narrow what operator and template allow.
    """

    def chat(
        self,
        identity: CallerIdentity,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt_ref: PromptRef | None = None,
        share: Share | None = None,
    ) -> BuiltPrompt: ...

    def text(
        self, identity: CallerIdentity, text: str, *, add_special_tokens: bool = True, share: Share | None = None
    ) -> BuiltPrompt: ...

    def tokens(
        self, identity: CallerIdentity, token_ids: Sequence[int], *, share: Share | None = None
    ) -> BuiltPrompt: ...
