"""Names for the identifiers that are easily swapped. All of them are opaque outside the module that makes them."""

from __future__ import annotations

import secrets
from typing import NewType

TenantId = NewType("TenantId", str)
"""A customer, as written in an API key. Raw: never leaves the gateway."""
UserId = NewType("UserId", str)
"""A user of a tenant. Raw: never leaves the gateway."""
PrincipalHash = NewType("PrincipalHash", bytes)
"""Keyed hash of a tenant, user, session or salt, 32 bytes: the only form that workers, router and Redis see."""
RequestId = NewType("RequestId", str)
"""Made by the gateway, unique for ever; never a caller's own id, which may be reused."""
WorkerId = NewType("WorkerId", str)
"""A worker replica. A replaced one gets a new id; an epoch names one life of its process."""
BlockKey = NewType("BlockKey", bytes)
"""Keyed 256-bit hash that names the content and scope of one full block (see cache_service/block_key.py)."""


def new_request_id() -> RequestId:
    return RequestId(secrets.token_hex(16))


def new_epoch() -> str:
    """A worker's epoch: random, so that a restarted worker can never be taken for its predecessor."""
    return secrets.token_hex(8)
