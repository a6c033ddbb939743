"""`watchword serve` ends on a signal, whichever of its threads the system gives it to."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

SERVE = """
import signal, sys, threading, time
from types import SimpleNamespace

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
if sys.argv[1] == "another":  # as it happens to a signal that came while the process was suspended
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
nothing = SimpleNamespace(start=lambda: None, wait_ready=lambda timeout_s, stop: True, stop=lambda: None)
# In the module's place and not in the module: importing the real one brings Ray, and takes seconds.
sys.modules["cluster.local"] = SimpleNamespace(LocalCluster=lambda config, report: nothing)
from cluster.commands import serve
serve._print_addresses = lambda cluster, elapsed_s: print("ready", flush=True)
serve.run_local(None)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("thread", ["main", "another"])
def test_a_signal_ends_the_server(number: signal.Signals, thread: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVE, thread], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.2)  # it is waiting by now
        process.send_signal(number)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()
