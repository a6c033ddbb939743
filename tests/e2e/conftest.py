from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from e2e_server import PATIENCE_S, Server

from cluster.api.principal import Role
from cluster.auth.key_store import create_key


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
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


_RUNNING = ExitStack()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A cluster that takes minutes to start, on a slow machine, is not one that hangs."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1000))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The cluster ends with the last test that may need it, not with the session: others want its processors."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _RUNNING.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Two workers, embedded Valkey, SmolLM2, API keys: the whole path, real in every part."""
    state_dir = tmp_path_factory.mktemp("state")
    operator = make_key(state_dir, "--tenant", "acme", "--operator")  # one by the command, which takes a second
    (store,) = state_dir.rglob("keys.json")

    def key(tenant: str, *roles: Role, user: str | None = None) -> str:
        return create_key(store, tenant, roles=frozenset(roles), user=user)[1]

    keys = Keys(
        operator=operator,
        delegate=key("acme", Role.DELEGATE),
        alice=key("acme", user="alice"),
        bob=key("acme", user="bob"),
        other_tenant=key("globex", Role.DELEGATE),
    )
    server = Server(state_dir, "--workers=2", "--debug-headers", "--kv-memory-gib=0.5")
    _RUNNING.callback(_stop, server)
    server.wait_ready(workers=2)
    return Cluster(server, keys)


def _stop(server: Server) -> None:
    status = server.stop()
    assert status == 0, server.output()
    assert "ServeController" not in server.output(), "what Ray says of its own end is of no use to anyone"
