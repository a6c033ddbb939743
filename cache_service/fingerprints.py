"""Fingerprints: the first 64 bits of a block key, which is a uniformly distributed keyed hash.

The index holds tens of millions of them. Two keys that share a fingerprint (3e-11 per 64-block lookup at 10 million
blocks) cost a misplaced request and nothing else: the engine verifies tokens and scope on every hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cache_service.events import AllBlocksCleared, BlockEvent, BlockStored
from cluster.api.ids import BlockKey

FINGERPRINT_BYTES = 8
Fingerprints = NDArray[np.uint64]
_ONE = np.uint64(1)


def fingerprint(key: BlockKey) -> bytes:
    return key[:FINGERPRINT_BYTES]


def fingerprints(keys: Sequence[BlockKey]) -> Fingerprints:
    """[n] uint64. Keys that are already cut to their fingerprints are accepted too. Raises ValueError for shorter ones.

    0 becomes 1, since 0 means "free" in the table.
    """
    packed = b"".join(keys)
    stride = len(packed) // (FINGERPRINT_BYTES * len(keys)) if keys else 1
    if not (keys and len(keys[0]) == len(keys[-1]) == stride * FINGERPRINT_BYTES) or len(set(map(len, keys))) > 1:
        packed, stride = b"".join([key[:FINGERPRINT_BYTES] for key in keys]), 1
    if len(packed) != stride * FINGERPRINT_BYTES * len(keys):
        raise ValueError(f"a block key has fewer than {FINGERPRINT_BYTES} bytes")
    return np.maximum(np.frombuffer(packed, dtype="<u8")[::stride], _ONE)


def unpack(packed: bytes) -> tuple[BlockKey, ...]:
    """Cut keys from their concatenation. Raises ValueError when a piece is left over."""
    if len(packed) % FINGERPRINT_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of fingerprints")
    size = FINGERPRINT_BYTES
    return tuple(BlockKey(packed[start : start + size]) for start in range(0, len(packed), size))


def net_effect(events: Iterable[BlockEvent]) -> tuple[bool, dict[bytes, bool]]:
    """What a batch comes down to: whether all was cleared, then fingerprint -> held (True) or gone (False)."""
    cleared = False
    held: dict[bytes, bool] = {}
    for event in events:
        if isinstance(event, AllBlocksCleared):
            cleared = True
            held.clear()
        else:
            is_held = isinstance(event, BlockStored)
            for key in event.keys:
                held[key[:FINGERPRINT_BYTES]] = is_held
    return cleared, held
