import subprocess
import sys
import time

import psutil
import pytest

from cluster.bench.turns import stopped

_PARENT = "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"


@pytest.fixture
def family():
    """A process and the child that it started."""
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE)
    child = psutil.Process(int(parent.stdout.readline()))
    yield psutil.Process(parent.pid), child
    child.kill()
    parent.wait(timeout=60)


def _all_become(family, *, stopped: bool) -> bool:
    """A signal takes effect when the process is next scheduled."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if all((process.status() == psutil.STATUS_STOPPED) is stopped for process in family):
            return True
        time.sleep(0.01)
    return False


def test_a_server_is_stopped_with_what_it_started_and_goes_on_afterwards(family) -> None:
    with stopped([family[0].pid]):
        assert _all_become(family, stopped=True)
    assert _all_become(family, stopped=False)


def test_a_failed_measurement_leaves_nothing_stopped(family) -> None:
    with pytest.raises(RuntimeError), stopped([family[0].pid]):  # noqa: PT012  # that it was stopped is half the test
        assert _all_become(family, stopped=True)
        raise RuntimeError("the load generator failed")
    assert _all_become(family, stopped=False)


def test_nothing_is_measured_beside_a_server_that_cannot_be_stopped() -> None:
    with pytest.raises(ProcessLookupError, match="no process 999999999"), stopped([999999999]):
        pass
