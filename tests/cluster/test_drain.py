"""The preStop hook: waits for real connections to end, and not for ever."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.drain import count_connections, wait_until_idle


@pytest.fixture(params=["127.0.0.1", "::1"])
def connection(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    """(port, the client's socket) of an open connection over loopback."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((request.param, 0))
        except OSError:
            pytest.skip(f"no {request.param} here")
        listener.listen()
        # From a port of its own: one that the system chooses may be another process's to another address too.
        with socket.create_connection(listener.getsockname()[:2], source_address=(request.param, 0)) as client:
            accepted, _ = listener.accept()
            with accepted:
                yield listener.getsockname()[1], client, accepted


def test_counts_only_established_connections_of_the_port(connection) -> None:  # type: ignore[no-untyped-def]
    port, client, accepted = connection
    assert count_connections([port]) == 1
    assert count_connections([client.getsockname()[1]]) == 1
    assert count_connections([1]) == 0
    client.close()
    accepted.close()
    assert count_connections([port]) == 0


def test_returns_as_soon_as_the_last_connection_ends() -> None:
    now = 0.0
    left = iter([2, 1, 0])

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    assert wait_until_idle(lambda: next(left), settle_s=5, timeout_s=60, clock=lambda: now, sleep=sleep) == 0
    assert now == 6.0


def test_gives_up_at_the_time_limit() -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    assert wait_until_idle(lambda: 3, settle_s=5, timeout_s=20, clock=lambda: now, sleep=sleep) == 3
    assert now == 20.0


def test_the_command_waits_for_a_real_connection(connection, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    port, client, accepted = connection
    begun = tmp_path / "begun"
    options = ["--port", str(port), "--settle-s", "0", "--timeout-s", "600", "--file", str(begun)]
    process = subprocess.Popen([sys.executable, "-m", "cluster.drain", *options], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not begun.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)  # it counts at once
        assert process.poll() is None
        client.close()
        accepted.close()
        assert process.wait(timeout=120) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.communicate()
