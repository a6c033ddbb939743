"""Word that this process should take no new work, from inside (Serve stops the replica) or outside (a pod is going)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_CLOCK_GRAIN_S = 1.0  # file times are coarser than the clock


class DrainNotice:
    """`file` is made by a pod's preStop hook. One from before this process's start is of another life of the pod."""

    def __init__(self, file: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._started_unix_s = clock()
        self._is_given = False

    def give(self) -> None:
        self._is_given = True

    @property
    def is_given(self) -> bool:
        return self._is_given or self._is_in_file()

    def _is_in_file(self) -> bool:
        if self._file is None:
            return False
        try:
            return self._file.stat().st_mtime >= self._started_unix_s - _CLOCK_GRAIN_S
        except OSError:
            return False
