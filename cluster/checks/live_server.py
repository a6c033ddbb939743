"""A running server as the checklist sees it: over HTTP and from nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from cluster.api.errors import UnavailableError

_TIMEOUT = aiohttp.ClientTimeout(total=60)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    text: str
    body: Any  # None when it is not JSON


class LiveServer:
    """`url` with or without a trailing /v1. Use as a context manager."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key

    async def __aenter__(self) -> LiveServer:
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Reply:
        return await self._send("GET", path, self._api_key, None)

    async def get_as(self, api_key: str | None, path: str) -> Reply:
        """With another key, or none."""
        return await self._send("GET", path, api_key, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        return await self._send("POST", path, self._api_key, body)

    async def _send(self, method: str, path: str, api_key: str | None, body: Mapping[str, Any] | None) -> Reply:
        """Raises UnavailableError when nobody answers."""
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        try:
            async with self._session.request(method, self.url + path, headers=headers, json=body) as response:
                text = await response.text()
                is_json = response.content_type == "application/json"
                return Reply(response.status, text, await response.json() if is_json else None)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(f"{self.url} does not answer: {type(error).__name__}") from None
