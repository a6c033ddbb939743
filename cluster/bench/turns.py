"""Servers take turns: all but the one that is measured are stopped, with everything they started.

An idle server is not nothing: on two cores the neighbour that merely waited halved a rival whose threads spin until
all of them have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def stopped(pids: Collection[int]) -> Iterator[None]:
    """Stops these processes and all their descendants (SIGSTOP), and lets them go on afterwards, whatever happens.

    Raises ProcessLookupError for a process that is not there: a server that should have been stopped would run along.
    """
    trees = [_tree(pid) for pid in pids]
    try:
        for process in (process for tree in trees for process in tree):
            _tell(process, psutil.Process.suspend)
        yield
    finally:
        for process in (process for tree in trees for process in reversed(tree)):
            _tell(process, psutil.Process.resume)


def _tree(pid: int) -> list[psutil.Process]:
    """Parents first: nobody is left to start another child unseen, or to miss one."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"there is no process {pid}") from None


def _tell(process: psutil.Process, what: Callable[[psutil.Process], None]) -> None:
    with suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
        what(process)
