"""Decides which leading blocks of a finished prompt carry a scope wider than the caller's own.

Always on tokens: the full prompt is compared, block by block, with canonical tokens, whatever the strings looked like.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from cluster.api.prompt import CallerIdentity
from cluster.api.scope import Scope, ScopeFields, ScopeSpan
from cluster.prompts.canonical import CanonicalPrefix, num_equal
from cluster.prompts.catalog import TemplateCatalog
from cluster.prompts.policy import Share, narrowest
from cluster.prompts.store import RegisteredTemplate
from cluster.prompts.template import canonical_json


class PromptScoper:
    """Grants scopes under the operator's, the template's and the request's policy."""

    def __init__(self, catalog: TemplateCatalog) -> None:
        self._catalog = catalog
        self._keyer = catalog.keyer

    def share_of(self, identity: CallerIdentity, registered: RegisteredTemplate | None, asked: Share | None) -> Share:
        """A caller's salt keeps what depends on variables to themselves."""
        salted = Share.TEMPLATE if identity.private.salt is not None else None
        of_template = registered.template.share if registered is not None else None
        return narrowest(self._catalog.policy.of(identity.tenant), of_template, asked, salted)

    def raw(self, identity: CallerIdentity, token_ids: Sequence[int], asked: Share | None) -> tuple[ScopeSpan, ...]:
        """A prompt without a named template: pinned blocks are granted to whoever's tokens equal them."""
        rest = ScopeSpan(None, identity.private)
        if self.share_of(identity, None, asked).width < Share.TEMPLATE.width:
            return (rest,)
        match = self._catalog.match_raw(identity.tenant, token_ids)
        return (rest,) if match is None else (ScopeSpan(match[1], match[0]), rest)

    def templated(
        self,
        identity: CallerIdentity,
        token_ids: Sequence[int],
        registered: RegisteredTemplate,
        values: Mapping[str, Any],
        asked: Share | None,
    ) -> tuple[ScopeSpan, ...]:
        """A prompt made from a registered template."""
        share = self.share_of(identity, registered, asked)
        rest = ScopeSpan(None, identity.private)
        if share.width < Share.TEMPLATE.width:
            return (rest,)
        granted, is_complete = self._template_blocks(registered, token_ids)
        if share is Share.VARIABLES and is_complete and registered.template.shared_names:
            granted += self._variable_blocks(identity, token_ids, registered, values, len(granted))
        return (*_spans(granted), rest)

    def _template_blocks(
        self, registered: RegisteredTemplate, token_ids: Sequence[int]
    ) -> tuple[list[ScopeFields], bool]:
        """Pinned blocks that the prompt begins with; False when the template's own blocks are not pinned, and so
        nothing that hangs on them may be shared either."""
        run = self._catalog.pinned_run(registered)
        if run is None:
            return [], not self._catalog.has_template_blocks(registered)
        num_blocks = num_equal(token_ids, run.token_ids) // self._keyer.block_size
        return [run.fields] * num_blocks, True

    def _variable_blocks(
        self,
        identity: CallerIdentity,
        token_ids: Sequence[int],
        registered: RegisteredTemplate,
        values: Mapping[str, Any],
        num_granted: int,
    ) -> list[ScopeFields]:
        prefix = self._catalog.variables_prefix(registered, values)
        size = self._keyer.block_size
        num_blocks = min(num_equal(token_ids, prefix.token_ids), prefix.num_tokens_allowed) // size
        template = self._catalog.fields(registered).template
        base = ScopeFields(Scope.VARIABLES, identity.tenant, template=template)
        return [
            replace(base, variables=self._digest(names, values))
            for names in _dependencies(prefix, num_granted, num_blocks)
        ]

    def _digest(self, names: Iterable[str], values: Mapping[str, Any]) -> bytes:
        parts = [part for name in names for part in (name.encode(), canonical_json(values[name]))]
        return self._keyer.digest("variables", *parts)


def _dependencies(prefix: CanonicalPrefix, start: int, end: int) -> list[tuple[str, ...]]:
    """The variables that key blocks start … end - 1.

    A block that depends on none but is not pinned either (the granularity, or a clock that has moved on) is keyed by
    the variables of the next one that does: whether it hits must not tell that anybody used the template at all.
    """
    following: tuple[str, ...] = ()
    names: list[tuple[str, ...]] = []
    for index in reversed(range(start, end)):  # dependencies only grow along a prompt
        following = prefix.dependencies[index] or following
        names.append(following)
    names.reverse()
    return names if following else []


def _spans(granted: Sequence[ScopeFields]) -> tuple[ScopeSpan, ...]:
    return tuple(ScopeSpan(len(list(run)), fields) for fields, run in groupby(granted))
