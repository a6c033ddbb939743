"""How slow this machine is just now: promises in seconds are made for one that does this work in `PACE_S`."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b

PACE_S = 0.05


def slowness(clock: Callable[[], float] = time.monotonic) -> float:
    """At least 1. With `time.process_time`: of the processor alone, whoever else wants it."""
    started = clock()
    for number in range(50_000):
        blake2b(f"{number}".encode(), digest_size=32).digest()
    return max(1.0, (clock() - started) / PACE_S)
