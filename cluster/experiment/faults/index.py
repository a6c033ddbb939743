"""Faults of the prefix index. What it says is a hint that the engine verifies, so they can misroute and never leak."""

from __future__ import annotations

from collections.abc import Sequence

from cache_service.prefix_index import InMemoryPrefixIndex
from cluster.api.ids import BlockKey, WorkerId
from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.targets.stack import StackParts


class KeepsOldEpoch(InMemoryPrefixIndex):
    """A restarted worker is believed to hold what its predecessor held."""

    def _clear(self, bit: int) -> None:
        self._speculation.drop(bit)


class RepliesOneBehind(InMemoryPrefixIndex):
    """Each question gets the answer to the one before, as on a connection with a reply left unread."""

    def __init__(self) -> None:
        super().__init__()
        self._unread: dict[WorkerId, int] = {}

    def match(self, keys: Sequence[BlockKey]) -> dict[WorkerId, int]:
        reply, self._unread = self._unread, super().match(keys)
        return reply


FAULTS = (
    Fault(
        "stale_index_after_restart",
        Component.INDEX,
        "the index keeps what a restarted worker held before",
        lambda: StackParts(index=KeepsOldEpoch),
    ),
    Fault(
        "redis_reply_off_by_one",
        Component.INDEX,
        "each question to the index gets the answer to the one before",
        lambda: StackParts(index=RepliesOneBehind),
    ),
)
