"""A real `watchword serve` as a subprocess: its own state folder, free ports, API keys. Ends what it started, by id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

sys.path.append(str(Path(__file__).parents[1] / "cache_service"))  # for the scripts of this folder
from free_ports import free_port

# Nothing here takes a tenth of it, and no machine is told from another by it: what does not come in this time hangs.
PATIENCE_S = 240.0

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], what: str, timeout_s: float = PATIENCE_S) -> Found:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.2)
    return value


class Server:
    """One running cluster. `args` are further flags of `watchword serve`."""

    def __init__(self, state_dir: Path, *args: str, env: dict[str, str] | None = None) -> None:
        self.state_dir = state_dir
        self.http_port, self.grpc_port = free_port(), free_port()
        self.log_path = state_dir / "serve.log"
        command = [
            str(Path(sys.executable).with_name("watchword")),
            "serve",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            *args,
        ]
        environ = {**os.environ, "WATCHWORD_STATE_DIR": str(state_dir), **(env or {})}
        self.log = self.log_path.open("wb")
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environ, start_new_session=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, workers: int, timeout_s: float = PATIENCE_S) -> float:
        """Seconds from start until all workers answer."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.output()
            if self.num_workers() >= workers:
                return time.monotonic() - self.started
            time.sleep(0.2)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.output()}")

    def num_workers(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=20) as response:
                return int(response.headers["x-watchword-workers"])
        except urllib.error.HTTPError as error:
            return int(error.headers.get("x-watchword-workers") or 0)
        except OSError:
            return 0

    def processes(self) -> list[psutil.Process]:
        """The server and everything that descends from it."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def find(self, fragment: str) -> list[psutil.Process]:
        """Descendants whose command line contains `fragment`."""
        found = []
        for process in self.processes():
            try:
                if fragment in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        """Ctrl-C; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for process in reversed(self.processes()):
                process.kill()
            status = self.process.wait()
        self.log.close()
        return status
