"""Sets of workers, numbered, so that a table entry needs 32 bits however many workers there are.

Each distinct set of owners exists once, as a bit mask. A worker that dies leaves all its blocks by clearing one bit in
each of the few distinct sets, whatever the number of blocks. Set 0 is the empty set of absent entries.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cache_service.fingerprint_table import Values


class OwnerSets:
    def __init__(self) -> None:
        self.masks: list[int] = [0]
        self._counts: list[int] = [0]  # entries in the table that carry the set
        self._by_mask: dict[int, int] = {0: 0}
        self._free: list[int] = []

    @property
    def num_entries(self) -> int:
        """Entries that some worker holds."""
        return sum(count for mask, count in zip(self.masks, self._counts, strict=True) if mask)

    @property
    def num_abandoned(self) -> int:
        """Entries still in the table that nobody holds any more."""
        return sum(count for mask, count in zip(self.masks, self._counts, strict=True) if not mask)

    def count(self, bit: int) -> int:
        return sum(count for mask, count in zip(self.masks, self._counts, strict=True) if mask & bit)

    def holding(self, bit: int) -> list[int]:
        return [number for number, mask in enumerate(self.masks) if mask & bit]

    def add(self, old: Values, bit: int) -> Values:
        return self._change(old, lambda mask: mask | bit)

    def remove(self, old: Values, bit: int) -> Values:
        return self._change(old, lambda mask: mask & ~bit)

    def forget(self, bit: int) -> None:
        """Takes the worker out of every set."""
        for number in self.holding(bit):
            mask = self.masks[number]
            if self._by_mask.get(mask) == number:
                del self._by_mask[mask]
            self.masks[number] = mask & ~bit
            if mask & ~bit:
                self._by_mask.setdefault(mask & ~bit, number)

    def keep_owned(self, values: Values) -> NDArray[np.bool_]:
        """[n] True where someone holds the entry; the others count as gone from the table."""
        numbers, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        owned = np.array([self.masks[number] != 0 for number in numbers.tolist()], dtype=bool)
        for number, count in zip(numbers[~owned].tolist(), counts[~owned].tolist(), strict=True):
            self._leave(number, count)
        return owned[inverse]

    def _change(self, old: Values, change: Callable[[int], int]) -> Values:
        numbers, inverse, counts = np.unique(old, return_inverse=True, return_counts=True)
        new = np.empty(numbers.size, dtype=np.uint32)
        for index, (number, count) in enumerate(zip(numbers.tolist(), counts.tolist(), strict=True)):
            target = self._number(change(self.masks[number]))
            new[index] = target
            if target:
                self._counts[target] += count
            if number:
                self._leave(number, count)
        return new[inverse]

    def _number(self, mask: int) -> int:
        known = self._by_mask.get(mask)
        if known is not None:
            return known
        if self._free:
            number = self._free.pop()
            self.masks[number] = mask
        else:
            number = len(self.masks)
            self.masks.append(mask)
            self._counts.append(0)
        self._by_mask[mask] = number
        return number

    def _leave(self, number: int, count: int) -> None:
        self._counts[number] -= count
        assert self._counts[number] >= 0
        if self._counts[number] == 0 and number:
            mask = self.masks[number]
            if self._by_mask.get(mask) == number and mask:
                del self._by_mask[mask]
            self.masks[number] = 0
            self._free.append(number)
