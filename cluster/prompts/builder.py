"""From a request's messages or text to token ids and the scope of each block."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from cluster.api.errors import InvalidRequestError
from cluster.api.prompt import BuiltPrompt, CallerIdentity, PromptRef
from cluster.api.scope import ScopeSpan
from cluster.prompts.cardinality import CardinalityWatch
from cluster.prompts.catalog import TemplateCatalog
from cluster.prompts.chat_encoder import ChatEncoder
from cluster.prompts.chat_template import Clock
from cluster.prompts.messages import checked_unicode, normalize_messages
from cluster.prompts.policy import Share
from cluster.prompts.scoping import PromptScoper
from cluster.prompts.store import RegisteredTemplate
from cluster.prompts.template import canonical_json
from cluster.prompts.tokenizer import Tokenizer


class PromptBuilder:
    """Renders, tokenizes and scopes. Thread-safe; blocking, so call it off the event loop.

    Without a catalog there are no registered templates and every block is the caller's own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        catalog: TemplateCatalog | None = None,
        watch: CardinalityWatch | None = None,
        clock: Clock = datetime.now,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = catalog.encoder if catalog is not None else ChatEncoder(tokenizer, clock)
        self.watch = watch or CardinalityWatch()
        self._catalog = catalog
        self._scoper = PromptScoper(catalog) if catalog is not None else None

    def chat(
        self,
        identity: CallerIdentity,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt_ref: PromptRef | None = None,
        add_generation_prompt: bool = True,
        share: Share | None = None,
    ) -> BuiltPrompt:
        """The template's messages, then the request's. `share` can only narrow what policy and template allow.

        Raises InvalidRequestError (with the field at fault), NotFoundError for an unknown prompt id.
        """
        turns = normalize_messages(messages)
        if prompt_ref is not None:
            return self._templated(identity, turns, prompt_ref, add_generation_prompt, share)
        if not turns:
            raise InvalidRequestError("messages must hold at least one message", param="messages")
        token_ids = self.encoder.encode(turns, add_generation_prompt=add_generation_prompt).token_ids
        return self._raw(identity, token_ids, share)

    def text(
        self, identity: CallerIdentity, text: str, *, add_special_tokens: bool = True, share: Share | None = None
    ) -> BuiltPrompt:
        """A bare prompt: control-token look-alikes are plain text; send token ids to place control tokens."""
        encoded = self.tokenizer.encode_plain(checked_unicode(text, "prompt"), add_special_tokens=add_special_tokens)
        return self.tokens(identity, encoded.token_ids, share=share)

    def tokens(self, identity: CallerIdentity, token_ids: Sequence[int], *, share: Share | None = None) -> BuiltPrompt:
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
        return self._raw(identity, tuple(token_ids), share)

    def _raw(self, identity: CallerIdentity, token_ids: tuple[int, ...], asked: Share | None) -> BuiltPrompt:
        if self._scoper is None:
            return _finished(identity, token_ids, (ScopeSpan(None, identity.private),), asked)
        share = self._scoper.share_of(identity, None, asked)
        return _finished(identity, token_ids, self._scoper.raw(identity, token_ids, share), share)

    def _templated(
        self,
        identity: CallerIdentity,
        turns: list[dict[str, Any]],
        ref: PromptRef,
        add_generation_prompt: bool,
        asked: Share | None,
    ) -> BuiltPrompt:
        if self._catalog is None or self._scoper is None:
            raise InvalidRequestError("this server has no prompt templates", param="prompt")
        registered = self._catalog.store.get(identity.tenant, ref.id, ref.version)
        values = registered.template.check_values(ref.variables)
        self._watch_values(identity, registered, values)
        turns = [*self._catalog.render(registered, values), *turns]
        token_ids = self.encoder.encode(turns, add_generation_prompt=add_generation_prompt).token_ids
        share = self._scoper.share_of(identity, registered, asked)
        spans = self._scoper.templated(identity, token_ids, registered, values, share)
        return _finished(identity, token_ids, spans, share)

    def _watch_values(
        self, identity: CallerIdentity, registered: RegisteredTemplate, values: Mapping[str, Any]
    ) -> None:
        assert self._catalog is not None
        digest = self._catalog.keyer.digest
        digests = {name: digest("value", canonical_json(values[name])) for name in registered.template.shared_names}
        self.watch.note(registered.tenant, registered.id, identity.user, digests)


def _finished(
    identity: CallerIdentity, token_ids: tuple[int, ...], spans: tuple[ScopeSpan, ...], share: Share | None
) -> BuiltPrompt:
    if share is not Share.NONE:
        return BuiltPrompt(token_ids, spans)
    # Nobody else has this salt, so nothing can hit even where the flag is ignored.
    lonely = replace(identity.private, salt=secrets.token_bytes(32))
    return BuiltPrompt(token_ids, (ScopeSpan(None, lonely),), use_prefix_cache=False)
