"""`watchword trace`: every block that a request read or wrote and where each came from; for a contaminated answer,
the first step and block at which foreign state came in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.experiment.event_file import BlockEvent, EventFile, of_request

_NARROW = {None, "USER", "SESSION"}  # scopes whose blocks never leave their user


@dataclass(frozen=True, slots=True)
class TouchedBlock:
    """A block in the life in which a request had it. `origin` wrote it; `history` is everything that happened to it."""

    block: int
    generation: int
    first_step: int
    way: str  # how the request came to it: allocate or reuse
    origin: str | None
    scope: str | None
    history: tuple[BlockEvent, ...]


@dataclass(frozen=True, slots=True)
class ForeignState:
    """Where state of another came in. `why` says what is wrong with it."""

    step: int
    block: int | None
    origin: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Trace:
    request: str
    blocks: tuple[TouchedBlock, ...]
    foreign: ForeignState | None


def trace_request(content: EventFile, request: str) -> Trace:
    """Raises KeyError when no event names the request."""
    own = of_request(content.events, request)
    if not own:
        raise KeyError(request)
    blocks = [_touched(content.events, event) for event in _first_touches(own)]
    return Trace(request, tuple(blocks), _foreign_state(content, request, blocks))


def _first_touches(own: Sequence[BlockEvent]) -> list[BlockEvent]:
    first: dict[tuple[int, int, int], BlockEvent] = {}
    for event in own:
        if event.action in ("allocate", "reuse"):
            first.setdefault(event.place, event)
    return list(first.values())


def _touched(events: Sequence[BlockEvent], touch: BlockEvent) -> TouchedBlock:
    history = tuple(event for event in events if event.place == touch.place)
    writers = [event.request for event in history if event.action == "write"]
    scope = next((event.scope for event in history if event.scope is not None), None)
    return TouchedBlock(
        touch.block, touch.generation, touch.step, touch.action, writers[0] if writers else None, scope, history
    )


def _foreign_state(content: EventFile, request: str, blocks: Sequence[TouchedBlock]) -> ForeignState | None:
    found = [
        *(_wrong_owner(content, request, touched) for touched in blocks),
        *(_unwritten(touched) for touched in blocks),
        *(_taken_away(content.events, request, touched) for touched in blocks),
    ]
    seen = sorted((one for one in found if one is not None), key=lambda one: one.step)
    if seen:
        return seen[0]
    step = content.corrupted.get(request)
    if step is None:
        return None
    why = "no block changed hands: the foreign state came in inside this step (mask, layout, positions or sampling)"
    return ForeignState(step, None, None, why)


def _wrong_owner(content: EventFile, request: str, touched: TouchedBlock) -> ForeignState | None:
    if touched.origin is None or touched.scope not in _NARROW or touched.origin == request:
        return None
    if content.users.get(touched.origin) == content.users.get(request):
        return None
    why = "written for another user or session, and not shared"
    return ForeignState(touched.first_step, touched.block, touched.origin, why)


def _unwritten(touched: TouchedBlock) -> ForeignState | None:
    """A block taken from the cache in a step before the one that wrote it."""
    if touched.way != "reuse":
        return None
    written = [event.step for event in touched.history if event.action == "write"]
    if written and min(written) < touched.first_step:
        return None
    return ForeignState(touched.first_step, touched.block, touched.origin, "taken for a hit before it was written")


def _taken_away(events: Sequence[BlockEvent], request: str, touched: TouchedBlock) -> ForeignState | None:
    """Another request got the same block while this one still held it."""
    held = [event for event in touched.history if event.request == request]
    num_held = sum({"allocate": 1, "reuse": 1, "release": -1}.get(event.action, 0) for event in held)
    # A reference that was never given back in this life lasted until the request's own end.
    last = held[-1] if num_held <= 0 else of_request(events, request)[-1]
    for event in events:
        is_later_life = event.block == touched.block and event.generation > touched.generation
        is_in_between = event.life == last.life and event.step < last.step
        if event.action == "allocate" and is_later_life and is_in_between and event.request != request:
            return ForeignState(event.step, touched.block, event.request, "given to another request while still held")
    return None
