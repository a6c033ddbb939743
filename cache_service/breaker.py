"""A circuit breaker: after several failures in a row nobody waits for a dead server again until a probe succeeds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable


class CircuitBreaker:
    """Opens after `threshold` failures in a row, for `min_open_s` doubled each time up to `max_open_s`, with jitter.

    When the time is over one call may pass as a probe; its outcome closes or reopens the circuit.
    """

    def __init__(
        self,
        threshold: int = 3,
        min_open_s: float = 0.2,
        max_open_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._min_open_s = min_open_s
        self._max_open_s = max_open_s
        self._clock = clock
        self._num_failures = 0
        self._open_until = 0.0
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        return self._num_failures >= self._threshold

    def may_call(self) -> bool:
        """False while open. The first caller after that becomes the probe and must report an outcome."""
        if not self.is_open:
            return True
        if self._is_probing or self._clock() < self._open_until:
            return False
        self._is_probing = True
        return True

    def succeeded(self) -> None:
        self._num_failures = 0
        self._is_probing = False

    def failed(self) -> None:
        self._num_failures += 1
        self._is_probing = False
        if self.is_open:
            open_s = self._min_open_s * 2 ** min(self._num_failures - self._threshold, 16)
            self._open_until = self._clock() + min(open_s, self._max_open_s) * random.uniform(0.8, 1.0)
