"""The cluster secret: keys every hash of identity and content. Made once, mode 0600, or mounted from outside.

It is read from a file by each process; an environment variable or an argument would show up in Ray's tools.
A new secret means new keys everywhere: the cache is empty afterwards, by construction.
"""

from __future__ import annotations

import hmac
import os
import secrets
from hashlib import sha256
from pathlib import Path

from cluster.api.errors import InvalidRequestError

SECRET_BYTES = 32


def load_or_create_secret(path: Path) -> bytes:
    """The secret's bytes. Created when absent; refused when others could read it or it is too short."""
    if not path.exists():
        _create(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o007:
        raise InvalidRequestError(f"cluster secret {path} has mode {mode:04o}: it must not be readable by others")
    secret = path.read_bytes().strip()
    if len(secret) < SECRET_BYTES:
        raise InvalidRequestError(f"cluster secret {path} has {len(secret)} bytes, needs at least {SECRET_BYTES}")
    return secret


def channel_token(secret: bytes) -> str:
    """What a gateway shows a worker or the router to be let in; derived, so that it says nothing about the secret."""
    return hmac.new(secret, b"watchword worker channel", sha256).hexdigest()


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(SECRET_BYTES).encode())
    finally:
        os.close(descriptor)
    try:
        os.link(temporary, path)  # unlike rename, fails when another process was first: its secret stands
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
