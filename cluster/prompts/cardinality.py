"""Notices a shared variable that is as good as private: nearly as many values as users."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)
_MAX_TRACKED = 4096  # of values and users each; beyond that the verdict has long been reached


@dataclass(frozen=True, slots=True)
class CardinalityLimits:
    min_users: int = 20
    max_values_per_user: float = 0.8

    def __post_init__(self) -> None:
        if self.min_users < 2:
            raise ValueError(f"min_users is {self.min_users}, must be at least 2")


@dataclass(slots=True)
class _Seen:
    values: set[bytes] = field(default_factory=set)
    users: set[bytes] = field(default_factory=set)
    is_warned: bool = False


class CardinalityWatch:
    """Counts digests only, never values. Warns once for each variable of a template."""

    def __init__(self, limits: CardinalityLimits | None = None) -> None:
        self._limits = limits or CardinalityLimits()
        self._seen: dict[tuple[bytes | None, str, str], _Seen] = {}
        self._lock = threading.Lock()

    def note(self, tenant: bytes | None, template_id: str, user: bytes, digests: Mapping[str, bytes]) -> None:
        """`digests`: a digest of the value of each shared variable."""
        with self._lock:
            for name, digest in digests.items():
                seen = self._seen.setdefault((tenant, template_id, name), _Seen())
                if not seen.is_warned:
                    self._count(seen, user, digest)
                    self._judge(seen, template_id, name)

    def suspicious(self, tenant: bytes | None, template_id: str) -> tuple[str, ...]:
        """Variables of a template that should not be declared shared."""
        with self._lock:
            return tuple(
                sorted(
                    name
                    for (owner, template, name), seen in self._seen.items()
                    if (owner, template) == (tenant, template_id) and seen.is_warned
                )
            )

    def _count(self, seen: _Seen, user: bytes, digest: bytes) -> None:
        if len(seen.values) < _MAX_TRACKED and len(seen.users) < _MAX_TRACKED:
            seen.values.add(digest)
            seen.users.add(user)

    def _judge(self, seen: _Seen, template_id: str, name: str) -> None:
        limits = self._limits
        if len(seen.users) >= limits.min_users and len(seen.values) >= limits.max_values_per_user * len(seen.users):
            seen.is_warned = True
            _log.warning(
                "shared variable %r of prompt template %r has %d values for %d users: it looks private; declare it "
                '"share": "user"',
                name,
                template_id,
                len(seen.values),
                len(seen.users),
            )
