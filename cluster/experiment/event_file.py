"""A run's block events as JSON Lines: first who asked what, then every event in order. Holds no token and no text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.api.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One event of one block. `life` numbers the engine's restarts; steps count from 1 in each."""

    life: int
    step: int
    time_s: float
    action: str  # allocate, write, reuse, release, evict, publish
    block: int
    generation: int
    request: str | None  # the plan's name
    scope: str | None  # of a published block

    @property
    def place(self) -> tuple[int, int, int]:
        """A block in one of its lives."""
        return self.life, self.block, self.generation


@dataclass(frozen=True, slots=True)
class EventFile:
    """`users` maps requests to the (test) users who sent them, with their session where there is one; `corrupted` maps
    them to the step of the first wrong token."""

    users: Mapping[str, str]
    corrupted: Mapping[str, int]
    events: Sequence[BlockEvent]


def write_events(path: Path, content: EventFile) -> None:
    with path.open("w", encoding="utf-8") as file:
        header = {"users": dict(content.users), "corrupted": dict(content.corrupted)}
        file.write(json.dumps(header) + "\n")
        file.writelines(json.dumps(asdict(event)) + "\n" for event in content.events)


def read_events(path: Path) -> EventFile:
    """Raises InvalidRequestError when the file holds no events."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        header: dict[str, Any] = json.loads(lines[0])
        events = [BlockEvent(**json.loads(line)) for line in lines[1:]]
        return EventFile(header["users"], header["corrupted"], events)
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise InvalidRequestError(f"{path} holds no block events: {error}", param="events") from None


def of_request(events: Iterable[BlockEvent], name: str) -> list[BlockEvent]:
    return [event for event in events if event.request == name]
