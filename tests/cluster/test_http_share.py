"""A prompt that may not be shared leaves the front door as a request that neither reads nor fills the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from front_door import BytePrompts, FakeBackend, build_app, chat_body, client_of

from cluster.api.prompt import BuiltPrompt, CallerIdentity


class SharesNothing(BytePrompts):
    def tokens(self, identity: CallerIdentity, token_ids: Sequence[int]) -> BuiltPrompt:
        return replace(super().tokens(identity, token_ids), use_prefix_cache=False)


@pytest.mark.parametrize(("prompts", "expected"), [(SharesNothing(), False), (BytePrompts(), True)])
async def test_the_policy_reaches_the_worker(prompts: BytePrompts, expected: bool) -> None:
    backend = FakeBackend()
    async with client_of(build_app(backend, prompts=prompts)) as client:
        await client.post("/v1/chat/completions", json=chat_body())
    assert [request.use_prefix_cache for request in backend.requests] == [expected]
