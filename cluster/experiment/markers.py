"""Passphrases: random markers without meaning, and the search for them in whatever a server returns.

A marker is 3 to 5 consonants and 3 to 5 digits (6 to 10 characters): no language model writes one by chance, so a
marker in an answer came out of a prompt. The registry keeps every marker of a run, because a leak may come from a
neighbour, a filler or a request that finished long ago.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

_CONSONANTS = "BCDFGHJKLMNPQRSTVWXZ"
_DIGITS = "0123456789"
_MIN_HALF = 3
_MAX_HALF = 5
MIN_MARKER_CHARS = 2 * _MIN_HALF
MAX_MARKER_CHARS = 2 * _MAX_HALF


class Form(Enum):
    """How a marker stood in a text, strongest first."""

    WHOLE = "whole"
    CASE = "case"  # letters in another case
    SPACED = "spaced"  # broken up by spaces, punctuation or line ends
    SPLIT = "split"  # its letters and, later on, its digits

    @property
    def is_in_one_piece(self) -> bool:
        return self is not Form.SPLIT


@dataclass(frozen=True, slots=True)
class Sighting:
    """A marker of the run that was found in a text. `owner` names the request that it was issued to."""

    marker: str
    owner: str
    form: Form


class MarkerRegistry:
    """Issues markers and finds any of them in a text in time that does not depend on how many were issued."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._owners: dict[str, str] = {}
        self._cores: set[str] = set()
        self._digits_after: dict[str, set[str]] = {}  # letters -> digits of the markers that begin with them

    @classmethod
    def holding(cls, *markers: str) -> MarkerRegistry:
        """A registry of known markers, each its own owner."""
        registry = cls(random.Random(0))
        for marker in markers:
            registry.register(marker, marker)
        return registry

    def __len__(self) -> int:
        return len(self._owners)

    def issue(self, owner: str) -> str:
        """A fresh marker that neither contains nor is contained in an earlier one."""
        while True:
            marker = self._draw(_CONSONANTS) + self._draw(_DIGITS)
            if _core(marker) not in self._cores:
                self.register(marker, owner)
                return marker

    def register(self, marker: str, owner: str) -> None:
        """Adopts a marker issued before, when a recorded run is replayed. Raises ValueError when it is no marker."""
        letters, digits = split_halves(marker)
        self._owners[marker] = owner
        self._cores.add(_core(marker))
        self._digits_after.setdefault(letters, set()).add(digits)

    def owner(self, marker: str) -> str:
        return self._owners[marker]

    def search(self, text: str, ignore: Iterable[str] = ()) -> tuple[Sighting, ...]:
        """Every marker of the run in `text`, in whatever form, except those in `ignore`."""
        ignored = frozenset(ignore)
        packed = _pack(text)
        found = {
            marker: self._form(marker, text)
            for marker in self._windows(packed)
            if marker in self._owners and marker not in ignored
        }
        for marker in self._split_markers(packed):
            if marker not in ignored:
                found.setdefault(marker, Form.SPLIT)
        return tuple(Sighting(marker, self._owners[marker], form) for marker, form in sorted(found.items()))

    def _draw(self, alphabet: str) -> str:
        return "".join(self._rng.choice(alphabet) for _ in range(self._rng.randint(_MIN_HALF, _MAX_HALF)))

    @staticmethod
    def _windows(packed: str) -> Iterable[str]:
        for start in range(len(packed) - MIN_MARKER_CHARS + 1):
            for length in range(MIN_MARKER_CHARS, MAX_MARKER_CHARS + 1):
                if start + length <= len(packed):
                    yield packed[start : start + length]

    def _split_markers(self, packed: str) -> Iterable[str]:
        """Markers whose letters stand in the text and whose digits stand later. Short halves would meet by chance."""
        for start in range(len(packed) - _MIN_HALF):
            for length in range(_MIN_HALF + 1, _MAX_HALF + 1):
                letters = packed[start : start + length]
                rest = packed[start + length :]
                for digits in self._digits_after.get(letters, ()):
                    if len(digits) > _MIN_HALF and digits in rest:
                        yield letters + digits

    @staticmethod
    def _form(marker: str, text: str) -> Form:
        if marker in text:
            return Form.WHOLE
        return Form.CASE if marker in text.upper() else Form.SPACED


def split_halves(marker: str) -> tuple[str, str]:
    """("XKCD", "7391"). Raises ValueError for anything that is not letters followed by digits, 6 to 10 in all."""
    letters = marker.rstrip(_DIGITS)
    digits = marker[len(letters) :]
    well_formed = letters.isalpha() and letters.isupper() and _MIN_HALF <= len(letters) <= _MAX_HALF
    if not well_formed or not _MIN_HALF <= len(digits) <= _MAX_HALF:
        raise ValueError(f"{marker!r} is no marker: wanted 3 to 5 capital letters and 3 to 5 digits")
    return letters, digits


def _core(marker: str) -> str:
    """Last letters and first digits. A marker that contains another has the same core, so cores are unique."""
    letters, digits = split_halves(marker)
    return letters[-_MIN_HALF:] + digits[:_MIN_HALF]


def _pack(text: str) -> str:
    """Upper case, letters and digits only: what stays the same when a marker is spaced out or changes case."""
    return "".join(char for char in text.upper() if char.isalnum())
