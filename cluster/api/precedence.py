"""Engines go first: all other threads of the service run when an engine's don't, or in the share that the system keeps.

A step of the engine uses every core, in pieces of a tenth of a millisecond that all of its threads must finish. A
thread of another kind that cuts in stops them all; one that waits for the pause between two steps stops nobody
(docs/engine-log.md has what this is worth). Linux only; elsewhere nothing happens.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

_NICENESS = 5  # still a quarter of a core that an engine would take whole: a busy gateway must keep up with its engines


def thread_ids() -> frozenset[int]:
    """The system's ids of this process's threads. Empty where there are none to be had."""
    try:
        return frozenset(map(int, os.listdir("/proc/self/task")))
    except OSError:
        return frozenset()


def yield_at_start() -> None:
    """For a process's first thread: what it starts, threads and processes, cuts into nobody's time slice either."""
    if hasattr(os, "SCHED_BATCH"):
        _set_policy(0, os.SCHED_BATCH)


def yield_to_engines(engines: Collection[int] = ()) -> None:
    """Puts all threads of this process, and those that they start, behind `engines` (ids of some of them)."""
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread_id in thread_ids():
        if thread_id in engines:
            _set_policy(thread_id, os.SCHED_OTHER)
            continue
        _set_policy(thread_id, os.SCHED_BATCH)
        with suppress(OSError):  # it has ended meanwhile, or is nicer already
            if os.getpriority(os.PRIO_PROCESS, thread_id) < _NICENESS:
                os.setpriority(os.PRIO_PROCESS, thread_id, _NICENESS)


def _set_policy(thread_id: int, policy: int) -> None:
    with suppress(OSError):  # it has ended meanwhile, or somebody has decided otherwise
        os.sched_setscheduler(thread_id, policy, os.sched_param(0))
