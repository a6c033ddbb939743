"""Servers take turns: all but the one that is measured are stopped, with everything they started.

An idle server is not nothing: on two cores the neighbour that merely waited halved a rival whose threads spin until
all of them have arrived.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


@contextmanager
def stopped(pids: Collection[int]) -> Iterator[None]:
    """Stops these processes and all their descendants (SIGSTOP), and lets them go on afterwards, whatever happens.

    Raises ProcessLookupError for a process that is not there: a server that should have been stopped would run along.
    Needs psutil (extra `experiments`) when there are any.
    """
    family: list[psutil.Process] = []
    try:
        for pid in pids:
            _stop(_find(pid), family)
        yield
    finally:
        for process in reversed(family):
            _resume(process)


def _find(pid: int) -> psutil.Process:
    import psutil

    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"there is no process {pid}") from None


def _resume(process: psutil.Process) -> None:
    import psutil

    with suppress(psutil.NoSuchProcess):
        process.resume()


def _stop(process: psutil.Process, family: list[psutil.Process]) -> None:
    """The parent before its children are counted: what is stopped starts no more of them."""
    import psutil

    with suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
        process.suspend()
        family.append(process)
        for child in process.children():
            _stop(child, family)
