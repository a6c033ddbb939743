"""A hash table from 64-bit fingerprints to 32-bit values, vectorised, that never pauses to grow.

Buckets of eight entries lie in one cache line each, so that a lookup of 64 fingerprints costs 64 memory accesses and a
dozen numpy calls. Growing moves a few thousand entries per call, as Redis does with its own dictionary: a table of ten
million rebuilt at once would stop the router for seconds. Knows nothing of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from cache_service.fingerprints import Fingerprints

BUCKET = 8
MAX_LOAD = 0.7
MOVE_BUCKETS = 512
MIN_EXPECTED = 4096

# Fibonacci hashing: without it a stream of prints in the order of Redis's buckets would crowd a few of ours.
SPREAD = np.uint64(0x9E3779B97F4A7C15)

Values = NDArray[np.uint32]
Positions = NDArray[np.int64]


class _Buckets:
    """One fixed-size table; 0 marks a free entry. A bucket that ever overflowed sends lookups to its neighbour."""

    def __init__(self, num_buckets: int) -> None:
        self.prints = np.zeros((num_buckets, BUCKET), dtype=np.uint64)
        self.values = np.zeros((num_buckets, BUCKET), dtype=np.uint32)
        self.overflowed = np.zeros(num_buckets, dtype=bool)
        self.flat_prints = self.prints.reshape(-1)
        self.flat_values = self.values.reshape(-1)
        self._last = num_buckets - 1
        self._shift = np.uint64(64 - self._last.bit_length())
        self.num_used = 0

    @property
    def capacity(self) -> int:
        return self.flat_prints.size

    @property
    def num_bytes(self) -> int:
        return self.prints.nbytes + self.values.nbytes + self.overflowed.nbytes

    def _home(self, prints: Fingerprints) -> Positions:
        return ((prints * SPREAD) >> self._shift).astype(np.int64)

    def find(self, prints: Fingerprints) -> Positions:
        """[n] index into the flat arrays, -1 where absent."""
        buckets = self._home(prints)
        hits = self.prints[buckets] == prints[:, None]
        positions = hits.argmax(axis=1)
        found = hits.any(axis=1)
        positions += buckets * BUCKET
        if found.all():
            return positions
        positions[~found] = -1
        chained = np.flatnonzero(~found & self.overflowed[buckets])
        while chained.size:
            buckets[chained] = (buckets[chained] + 1) & self._last
            hits = self.prints[buckets[chained]] == prints[chained, None]
            found = hits.any(axis=1)
            positions[chained[found]] = buckets[chained[found]] * BUCKET + hits[found].argmax(axis=1)
            rest = chained[~found]
            chained = rest[self.overflowed[buckets[rest]]]
        return positions

    def insert(self, prints: Fingerprints, values: Values) -> None:
        """Adds distinct fingerprints that are absent."""
        self.num_used += prints.size
        buckets = self._home(prints)
        while prints.size:
            free = self.prints[buckets] == 0
            has_room = free.any(axis=1)
            full = buckets[~has_room]
            self.overflowed[full] = True
            buckets[~has_room] = (full + 1) & self._last
            positions = buckets * BUCKET + free.argmax(axis=1)
            # Several may aim at the same free entry: the last write wins, the others try again.
            self.flat_prints[positions[has_room]] = prints[has_room]
            placed = has_room & (self.flat_prints[positions] == prints)
            self.flat_values[positions[placed]] = values[placed]
            prints, values, buckets = prints[~placed], values[~placed], buckets[~placed]

    def erase(self, positions: Positions) -> None:
        self.flat_prints[positions] = 0
        self.flat_values[positions] = 0
        self.num_used -= positions.size

    def take(self, start: int, stop: int) -> tuple[Fingerprints, Values]:
        """Removes and returns what buckets start … stop - 1 hold."""
        chosen = np.flatnonzero(self.prints[start:stop].reshape(-1)) + start * BUCKET
        prints, values = self.flat_prints[chosen], self.flat_values[chosen]
        self.erase(chosen)
        return prints, values


class FingerprintTable:
    """`expected` sizes the first table. Value 0 means absent and is never stored.

    `keep(values) -> bool[n]` is asked for entries that move to a new table; those it refuses are dropped.
    """

    def __init__(self, keep: Callable[[Values], NDArray[np.bool_]], expected: int = 0) -> None:
        self._keep = keep
        self._current = _Buckets(_num_buckets(expected))
        self._previous: _Buckets | None = None
        self._next_to_move = 0

    def __len__(self) -> int:
        return sum(table.num_used for table in self._tables())

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self._tables())

    def get(self, prints: Fingerprints) -> Values:
        """[n] values, 0 where absent."""
        values = _get(self._current, prints)
        if self._previous is not None:
            values |= _get(self._previous, prints)
        return values

    def reserve(self, num_new: int) -> None:
        """Makes room. Apart from `put`, because it asks `keep` about values as they are now."""
        if self._previous is not None:
            self._move(MOVE_BUCKETS + num_new)
        if len(self) + num_new > MAX_LOAD * self._current.capacity:
            if self._previous is not None:
                self._move(self._previous.capacity)
            self._start_move(max(2 * self._current.overflowed.size, _num_buckets(len(self) + num_new)))

    def put(self, prints: Fingerprints, values: Values) -> None:
        """Sets the values of distinct fingerprints; 0 erases. `reserve` comes before."""
        for table in self._tables():
            positions = table.find(prints)
            present = positions >= 0
            if present.any():
                found, new = positions[present], values[present]
                table.flat_values[found] = new
                table.erase(found[new == 0])
                prints, values = prints[~present], values[~present]
        wanted = values != 0
        if wanted.any():
            self._current.insert(prints[wanted], values[wanted])

    def compact(self) -> None:
        """Begins to move everything to a new table, if that is not under way, so that refused entries go."""
        if self._previous is None:
            self._start_move(_num_buckets(len(self)))

    def items(self) -> Iterator[tuple[Fingerprints, Values]]:
        for table in self._tables():
            used = np.flatnonzero(table.flat_prints)
            yield table.flat_prints[used], table.flat_values[used]

    def _tables(self) -> tuple[_Buckets, ...]:
        return (self._current,) if self._previous is None else (self._current, self._previous)

    def _start_move(self, num_buckets: int) -> None:
        self._previous, self._current = self._current, _Buckets(num_buckets)
        self._next_to_move = 0

    def _move(self, num_buckets: int) -> None:
        assert self._previous is not None
        stop = min(self._next_to_move + num_buckets, self._previous.overflowed.size)
        prints, values = self._previous.take(self._next_to_move, stop)
        kept = self._keep(values)
        self._current.insert(prints[kept], values[kept])
        self._next_to_move = stop
        if stop == self._previous.overflowed.size:
            self._previous = None


def _num_buckets(expected: int) -> int:
    needed = max(expected, MIN_EXPECTED) / (MAX_LOAD * BUCKET)
    return 1 << math.ceil(math.log2(needed))


def _get(table: _Buckets, prints: Fingerprints) -> Values:
    positions = table.find(prints)
    values = table.flat_values[positions]
    values *= positions >= 0
    return values
