"""Sampling noise as a function of (seed, choice, position): no state, so every draw can be repeated anywhere."""

from __future__ import annotations

import struct
from hashlib import blake2b

_PERSON = b"ww-noise"


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    message = struct.pack("<QII", seed & 0xFFFFFFFFFFFFFFFF, choice, position)
    bits = int.from_bytes(blake2b(message, digest_size=8, person=_PERSON).digest(), "little")
    return (bits >> 11) * 2.0**-53
