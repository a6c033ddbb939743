"""Who is let in at an address, decided before anything listens there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.api.errors import InvalidRequestError
from cluster.auth.key_store import read_keys


@dataclass(frozen=True, slots=True)
class Access:
    """`warning` is for whoever starts the server."""

    needs_key: bool
    warning: str | None = None


def access_at(host: str, keys_path: Path, *, is_loopback: bool) -> Access:
    """Raises InvalidRequestError where everyone who reaches `host` would be operator, and for an unreadable key file.

    A file without keys locks the door, as for gateways: its keys were revoked, which opens nothing.
    """
    if read_keys(keys_path):
        return Access(needs_key=True)
    if keys_path.exists():
        return Access(
            needs_key=True,
            warning=f"{keys_path} holds no key: every request is refused until 'watchword keys create' makes one",
        )
    if not is_loopback:
        raise InvalidRequestError(
            f"refusing to listen on {host} without API keys: everyone who can reach it would be operator. "
            "Make a key first: watchword keys create --tenant NAME --operator"
        )
    return Access(needs_key=False, warning="no API keys: whoever reaches this address is operator of tenant 'default'")
