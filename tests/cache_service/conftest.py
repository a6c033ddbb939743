from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator

import pytest

from cache_service.embedded import EmbeddedRedis, EmbeddedRedisError, find_server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One server for all tests; each test has a namespace of its own."""
    try:
        find_server()
    except EmbeddedRedisError as error:
        pytest.skip(str(error))
    server = EmbeddedRedis(max_memory_mb=256)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def namespace() -> str:
    return f"test-{secrets.token_hex(6)}"
