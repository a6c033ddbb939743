"""`python -m cluster.drain`: waits until nobody is connected to the given ports any more. A pod's preStop hook runs it.

A pod that is being deleted leaves its Service at once, but balancers hear of it a moment later, and Ray ends its
processes as soon as the hook returns. So: tell the pod's gateway and worker (`--file`, their setting `drain_file`), let
the news settle, then let the open connections end. Standard library only, so that it starts fast.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
_POLL_S = 0.5


def count_connections(ports: Collection[int], tables: Collection[Path] = _TABLES) -> int:
    """Established connections whose own end is one of `ports`, in this network namespace."""
    count = 0
    for table in tables:
        if not table.exists():
            continue  # a kernel without IPv6
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            count += state == _ESTABLISHED and int(local.rpartition(":")[2], 16) in ports
    return count


def wait_until_idle(
    count: Callable[[], int],
    *,
    settle_s: float,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """How many connections are left when the time is up; 0 as soon as, after `settle_s`, there is none."""
    deadline = clock() + timeout_s
    sleep(min(settle_s, timeout_s))
    while (left := count()) and clock() < deadline:
        sleep(_POLL_S)
    return left


def main(arguments: list[str] | None = None) -> int:
    """Status 0 also when connections are left: the pod ends either way, and a failing hook only adds noise."""
    parser = argparse.ArgumentParser(prog="python -m cluster.drain", description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, action="append", required=True, help="may be given several times")
    parser.add_argument("--settle-s", type=float, default=5.0, help="wait at least so long (default: 5)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="wait at most so long (default: 120)")
    parser.add_argument("--file", type=Path, help="made first: gateway and worker then say that they drain")
    options = parser.parse_args(arguments)
    if options.file is not None:
        options.file.touch()
    left = wait_until_idle(
        lambda: count_connections(options.port), settle_s=options.settle_s, timeout_s=options.timeout_s
    )
    if left:
        print(f"{left} connections are still open after {options.timeout_s:g} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
