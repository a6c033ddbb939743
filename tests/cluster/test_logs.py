"""The access log comes out of a gateway, and holds neither users nor prompts."""

from __future__ import annotations

import io
import logging
from pathlib import Path

from front_door import FakeBackend, build_app, chat_body, client_of

from cluster.api.principal import Role
from cluster.auth.key_store import create_key
from cluster.logs import log_to


async def test_each_request_is_a_line_without_user_and_prompt(tmp_path: Path) -> None:
    record, key = create_key(tmp_path / "keys.json", "acme", roles=frozenset({Role.DELEGATE}))
    stream, logger = io.StringIO(), logging.getLogger("watchword")
    level, propagates = logger.level, logger.propagate
    handler = log_to(stream)
    try:
        async with client_of(build_app(FakeBackend(), keys_path=tmp_path / "keys.json"), key) as client:
            body = chat_body(user="alice-the-user", messages=[{"role": "user", "content": "a-private-prompt"}])
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
    [line] = stream.getvalue().splitlines()
    assert "INFO watchword.access POST /v1/chat/completions 200" in line
    assert f"key={record.id}" in line
    for private in ("alice-the-user", "a-private-prompt", key.split(".")[1], "acme"):
        assert private not in line
