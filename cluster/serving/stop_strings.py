"""Finds stop strings in text that arrives in pieces, and holds back what may still turn out to be one.

Where the text is cut does not depend on how it was cut into pieces: the first character at which any stop string is
complete ends it; of several that are complete there, the longest is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    stop: str
    text: str  # released text before the stop string


class StopStringMatcher:
    """One choice's matcher. `feed` returns the text that may be shown, or the match that ends the choice."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    @property
    def held(self) -> str:
        """Text not released yet: a proper prefix of some stop string."""
        return self._held

    def feed(self, piece: str, *, may_stop: bool = True) -> str | StopMatch:
        """`may_stop=False` lets text through in which a stop string does not count (min_tokens not reached)."""
        if not self._stops:
            return piece
        num_old = len(self._held)
        text = self._held + piece
        if may_stop:
            match = self._first_match(text, num_old)
            if match is not None:
                self._held = ""
                return match
        keep = self._num_to_hold(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held text, when the choice ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, num_old: int) -> StopMatch | None:
        best: tuple[int, int, str] | None = None  # (end, start, stop): first end wins, then the longest
        for stop in self._stops:
            # A match must end in the new piece; what ended earlier was judged when it arrived.
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return None
        return StopMatch(stop=best[2], text=text[: best[1]])

    def _num_to_hold(self, text: str) -> int:
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stops):
                return size
        return 0
