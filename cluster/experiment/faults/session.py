"""Faults of sessions: two conversations of one user meet, though each names a session of its own."""

from __future__ import annotations

from dataclasses import replace

from cluster.api.principal import Principal
from cluster.api.prompt import CallerIdentity
from cluster.api.scope import ScopeFields
from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.faults.keys import KeyerWithout, with_keys
from cluster.experiment.targets.stack import StackParts
from cluster.serving.core import ServedModel, ServingCore
from cluster.serving.generate_input import CallerFields
from workers.block import Block, BlockContent, BlockIdentity
from workers.prefix_cache import PrefixCache


class KeyerWithoutSession(KeyerWithout):
    @staticmethod
    def narrowed(fields: ScopeFields) -> ScopeFields:
        return replace(fields, session=None)


class CacheWithoutSession(PrefixCache):
    def matches(self, block: Block, wanted: BlockContent, parent: BlockIdentity | None) -> bool:
        held = block.content
        if held is not None:
            wanted = replace(wanted, fields=replace(wanted.fields, session=held.fields.session))
        return super().matches(block, wanted, parent)


class RemembersSession(ServingCore):
    """Keeps the session of a user's first request for all later ones. Keys and scopes agree with one another, so that
    no check inside the engine can see it."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._first: dict[bytes, CallerIdentity] = {}

    def identify(self, principal: Principal, caller: CallerFields, model: ServedModel) -> CallerIdentity:
        identity = super().identify(principal, caller, model)
        return self._first.setdefault(identity.user, identity)


FAULTS = (
    Fault(
        "key_without_session",
        Component.SESSION,
        "keys leave the session out",
        with_keys(KeyerWithoutSession, CacheWithoutSession),
    ),
    Fault(
        "session_kept_by_user",
        Component.SESSION,
        "all of a user's requests go by the session of the first",
        lambda: StackParts(core=RemembersSession),
    ),
)
