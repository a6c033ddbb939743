"""Ports for servers that are started a moment later, in this process or another.

A port found by binding to 0 can be given to anybody else before the server listens on it: Ray alone asks for dozens. So
these lie below the range from which the system gives ports away, and each test process has ports of its own.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FIRST_PORT = 20_000  # below are those that Ray gives its workers by itself
NUM_TEST_PROCESSES = 16  # that can run side by side


def free_port() -> int:
    """Of 127.0.0.1. No port comes twice."""
    return next(filter(_is_free, _CANDIDATES))


@contextmanager
def dead_port() -> Iterator[int]:
    """A port on which connections are refused for as long as this lasts."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def _candidates() -> Iterator[int]:
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_TEST_PROCESSES
    own = [port for port in range(FIRST_PORT, _first_given_away()) if port % NUM_TEST_PROCESSES == process]
    random.SystemRandom().shuffle(own)  # runs of the tests beside this one
    yield from own
    while True:  # a machine that gives away nearly all of them
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            yield int(probe.getsockname()[1])


def _first_given_away() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32_768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_CANDIDATES = _candidates()
