"""Blocks that a worker is about to hold: believed from the routing decision until the event, or for a short time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence


class Speculation:
    """Owner masks by fingerprint, each bit with a deadline. Small: it holds seconds of traffic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadlines: dict[int, dict[int, float]] = {}  # fingerprint -> owner bit -> end of belief
        self._queue: deque[tuple[float, int, Sequence[int]]] = deque()

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, bit: int, prints: Sequence[int], ttl_s: float) -> None:
        deadline = self._clock() + ttl_s
        for fingerprint in prints:
            self._deadlines.setdefault(fingerprint, {})[bit] = deadline
        self._queue.append((deadline, bit, prints))

    def extend(self, prints: Sequence[int], owners: Sequence[int]) -> list[int]:
        """[n] owner masks with the believed ones added."""
        return [
            mask | sum(self._deadlines[fingerprint]) & ~mask if fingerprint in self._deadlines else mask
            for fingerprint, mask in zip(prints, owners, strict=True)
        ]

    def expire(self) -> None:
        """Call before reading. With different times to live an entry may outlive its own by that of an earlier one."""
        now = self._clock()
        while self._queue and self._queue[0][0] <= now:
            _, bit, prints = self._queue.popleft()
            for fingerprint in prints:
                if self._deadlines.get(fingerprint, {}).get(bit, now + 1) <= now:
                    self.discard(bit, (fingerprint,))

    def discard(self, bit: int, prints: Sequence[int]) -> None:
        for fingerprint in prints:
            bits = self._deadlines.get(fingerprint)
            if bits is not None and bits.pop(bit, None) is not None and not bits:
                del self._deadlines[fingerprint]

    def drop(self, bit: int) -> None:
        for fingerprint in [print_ for print_, bits in self._deadlines.items() if bit in bits]:
            self.discard(bit, (fingerprint,))
