"""A key file with one user's key, for both front doors."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.api.principal import Role
from cluster.auth.key_store import create_key


@pytest.fixture
def keys_path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def credential(keys_path: Path) -> str:
    """`id.secret` of alice, an ordinary user of the tenant acme."""
    return create_key(keys_path, "acme", roles=frozenset({Role.USER}), user="alice")[1]
