import subprocess
import sys

import psutil
import pytest

from cluster.bench.turns import stopped

_PARENT = (
    "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
)


@pytest.fixture
def family():
    """A process and the child that it started."""
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE)
    child = psutil.Process(int(parent.stdout.readline()))
    yield psutil.Process(parent.pid), child
    child.kill()
    parent.wait(timeout=10)


def test_a_server_is_stopped_with_what_it_started_and_goes_on_afterwards(family) -> None:
    with stopped([family[0].pid]):
        assert [process.status() for process in family] == [psutil.STATUS_STOPPED] * 2
    assert psutil.STATUS_STOPPED not in [process.status() for process in family]


def test_a_failed_measurement_leaves_nothing_stopped(family) -> None:
    with pytest.raises(RuntimeError), stopped([family[0].pid]):
        raise RuntimeError("the load generator failed")
    assert psutil.STATUS_STOPPED not in [process.status() for process in family]


def test_nothing_is_measured_beside_a_server_that_cannot_be_stopped() -> None:
    with pytest.raises(ProcessLookupError, match="no process 999999999"), stopped([999999999]):
        pass
