from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from e2e_server import Server


@dataclass(frozen=True)
class Keys:
    operator: str
    delegate: str
    alice: str
    bob: str
    other_tenant: str


def make_key(state_dir: Path, *args: str) -> str:
    command = [str(Path(sys.executable).with_name("watchword")), "keys", "create", *args]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "WATCHWORD_STATE_DIR": str(state_dir)},
    )
    return result.stdout.strip().splitlines()[-1].split()[-1]


@dataclass(frozen=True)
class Cluster:
    server: Server
    keys: Keys

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0, timeout=60)


_RUNNING = ExitStack()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The cluster ends with the last test that may need it, not with the session: others want its processors."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _RUNNING.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Two workers, embedded Valkey, SmolLM2, API keys: the whole path, real in every part."""
    state_dir = tmp_path_factory.mktemp("state")
    keys = Keys(
        operator=make_key(state_dir, "--tenant", "acme", "--operator"),
        delegate=make_key(state_dir, "--tenant", "acme", "--delegate"),
        alice=make_key(state_dir, "--tenant", "acme", "--user", "alice"),
        bob=make_key(state_dir, "--tenant", "acme", "--user", "bob"),
        other_tenant=make_key(state_dir, "--tenant", "globex", "--delegate"),
    )
    server = Server(state_dir, "--workers=2", "--debug-headers", "--kv-memory-gib=0.5")
    _RUNNING.callback(_stop, server)
    server.wait_ready(workers=2)
    return Cluster(server, keys)


def _stop(server: Server) -> None:
    status = server.stop()
    assert status == 0, server.output()
    assert "ServeController" not in server.output(), "what Ray says of its own end is of no use to anyone"
