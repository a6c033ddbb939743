"""Refusals that only HTTP knows: they carry their own status, everything else goes by the one error table."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.api.errors import InvalidRequestError


class HttpRefusal(InvalidRequestError):
    """`headers` are sent along, e.g. Allow."""

    def __init__(self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.headers = dict(headers or {})
