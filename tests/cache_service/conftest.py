from __future__ import annotations

import secrets
from collections.abc import Iterator

import free_ports
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
def dead_port() -> Iterator[int]:
    """Connections to it are refused."""
    with free_ports.dead_port() as port:
        yield port


@pytest.fixture
def namespace() -> str:
    return f"test-{secrets.token_hex(6)}"
