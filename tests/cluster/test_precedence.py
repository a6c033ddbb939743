"""Threads that are no engine's give way; an engine's keep their place, whatever else their process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# In a process of its own: there is no way back without privileges.
PROCESS = """
import json, os, threading
from cluster.api.precedence import thread_ids, yield_at_start, yield_to_engines

def look(thread_id):
    return os.sched_getscheduler(thread_id), os.getpriority(os.PRIO_PROCESS, thread_id)

yield_at_start()
may_end, looks = threading.Event(), {}
before = thread_ids()
engine = threading.Thread(target=may_end.wait)
other = threading.Thread(target=may_end.wait)
engine.start(), other.start()
looks["found"] = sorted(thread_ids() - before) == sorted([engine.native_id, other.native_id])
looks["at start"] = look(other.native_id)
yield_to_engines([engine.native_id])
yield_to_engines([engine.native_id])  # once more changes nothing
later = threading.Thread(target=may_end.wait)
later.start()
looks |= {"engine": look(engine.native_id), "other": look(other.native_id), "later": look(later.native_id)}
may_end.set()
print(json.dumps(looks))
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_all_but_the_engines_threads_give_way() -> None:
    run = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    behind = [os.SCHED_BATCH, max(mine, 5)]
    assert json.loads(run.stdout) == {
        "found": True,
        "at start": [os.SCHED_BATCH, mine],
        "engine": [os.SCHED_OTHER, mine],
        "other": behind,
        "later": behind,
    }
