"""JSON for replies: compact, and in the caller's own characters rather than escapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

# One encoder for all: json.dumps with options would build a new one on every call.
_encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def to_json(value: Any) -> str:
    return _encode(value)


def to_json_bytes(value: Any) -> bytes:
    return _encode(value).encode()
