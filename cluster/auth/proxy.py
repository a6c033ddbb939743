"""Identity headers of web front ends, believed only from configured peers and ignored from everyone else."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from cluster.api.errors import InvalidRequestError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class IdentityHeaders:
    """`trusted_proxies` are addresses or networks of *peers* (X-Forwarded-For is a claim, not a peer)."""

    def __init__(self, trusted_proxies: Sequence[str], header_names: Sequence[str]) -> None:
        self._networks = [_network(text) for text in trusted_proxies]
        self._names = frozenset(name.lower() for name in header_names)

    def user_of(self, peer: str | None, headers: Iterable[tuple[str, str]]) -> str | None:
        """The user whom a trusted proxy names. Raises InvalidRequestError when it names two."""
        if not self._networks or not self._is_trusted(peer):
            return None
        users = {value for name, value in headers if name.lower() in self._names and value}
        if len(users) > 1:
            raise InvalidRequestError("the identity headers name different users", code="conflicting_user")
        return users.pop() if users else None

    def _is_trusted(self, peer: str | None) -> bool:
        try:
            address = ipaddress.ip_address(peer or "")
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise InvalidRequestError(f"trusted proxy {text!r} is not an IP address or network") from None
