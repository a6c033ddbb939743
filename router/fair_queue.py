"""Start-time fair queueing: tenants that compete are served in proportion to their weights, counted in tokens.

Each entry gets a start tag: the later of the queue's virtual time and the end of its tenant's previous entry. The
lowest tag goes first and sets the virtual time. So a tenant with a thousand entries waiting delays a newcomer by at
most one entry of each other tenant, and idle time cannot be saved up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Entry(Generic[T]):
    flow: Hashable
    cost: float
    item: T
    start_tag: float


@dataclass(slots=True)
class _Flow(Generic[T]):
    entries: dict[int, Entry[T]] = field(default_factory=dict)  # by id, in order of arrival
    end_tag: float = 0.0
    queued_cost: float = 0.0
    weight: float = 1.0


class FairQueue(Generic[T]):
    """Not bounded and not timed: admission decides who may enter and how long to stay."""

    def __init__(self) -> None:
        self._flows: dict[Hashable, _Flow[T]] = {}
        self._virtual_time = 0.0
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def push(self, flow: Hashable, cost: float, weight: float, item: T) -> Entry[T]:
        state = self._flows.setdefault(flow, _Flow())
        state.weight = weight
        entry = Entry(flow, cost, item, max(self._virtual_time, state.end_tag))
        state.end_tag = entry.start_tag + cost / weight
        state.entries[id(entry)] = entry
        state.queued_cost += cost
        self._num_entries += 1
        return entry

    def heads(self) -> Iterator[Entry[T]]:
        """The first entry of each flow, most deserving first. The caller may `serve` or `remove` as it goes."""
        heads = [next(iter(flow.entries.values())) for flow in self._flows.values() if flow.entries]
        yield from sorted(heads, key=lambda entry: entry.start_tag)

    def serve(self, entry: Entry[T]) -> None:
        """`entry` gets its turn."""
        self._virtual_time = max(self._virtual_time, entry.start_tag)
        self._take_out(entry)

    def remove(self, entry: Entry[T]) -> bool:
        """`entry` leaves without a turn; its tenant is not charged. False when it had left before."""
        flow = self._flows.get(entry.flow)
        if flow is None or id(entry) not in flow.entries:
            return False
        flow.end_tag -= entry.cost / flow.weight
        for later in flow.entries.values():
            if later.start_tag > entry.start_tag:
                later.start_tag -= entry.cost / flow.weight
        self._take_out(entry)
        return True

    def newest_of_longest(self) -> Entry[T] | None:
        """What to shed when the queue is full: from the flow with most waiting tokens per weight, its last entry."""
        flows = [flow for flow in self._flows.values() if flow.entries]
        if not flows:
            return None
        longest = max(flows, key=lambda flow: flow.queued_cost / flow.weight)
        return next(reversed(longest.entries.values()))

    def queued_cost(self, flow: Hashable | None = None) -> float:
        if flow is None:
            return sum(state.queued_cost for state in self._flows.values())
        state = self._flows.get(flow)
        return state.queued_cost if state else 0.0

    def share_of(self, flow: Hashable, weight: float) -> float:
        """The part of the service that `flow` gets while those that wait now keep waiting."""
        others = sum(state.weight for name, state in self._flows.items() if state.entries and name != flow)
        return weight / (weight + others)

    def _take_out(self, entry: Entry[T]) -> None:
        state = self._flows[entry.flow]
        del state.entries[id(entry)]
        state.queued_cost -= entry.cost
        self._num_entries -= 1
        if not state.entries and state.end_tag <= self._virtual_time:
            del self._flows[entry.flow]  # it would start anew at the virtual time anyway

    def forget_idle(self) -> None:
        """Drops flows that wait for nothing and owe nothing."""
        idle = [
            name for name, state in self._flows.items() if not state.entries and state.end_tag <= self._virtual_time
        ]
        for name in idle:
            del self._flows[name]
