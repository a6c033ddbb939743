"""Runs built prompts through a real engine over a fake model, and counts what the engine's cache gave to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fake_runner import FakeModelRunner, fake_identity
from prompt_rig import BLOCK_SIZE, PromptRig

from cache_service.block_key import ModelIdentity
from cluster.api.ids import RequestId, new_request_id
from cluster.api.prompt import BuiltPrompt, CallerIdentity
from cluster.api.request import Request
from cluster.api.sampling import SamplingParams
from cluster.api.scope import Scope
from workers.build import build_engine
from workers.config import EngineConfig

MAX_MODEL_LEN = 32_768


def fake_model_identity() -> ModelIdentity:
    """What a PromptRig must be made for, so that its keys are the engine's."""
    return fake_identity(BLOCK_SIZE)


class ScopeEngine:
    """One worker's engine, warmed with the rig's templates. Output tokens are of no interest here."""

    def __init__(self, rig: PromptRig, num_blocks: int = 4096, max_model_len: int = MAX_MODEL_LEN) -> None:
        runner = FakeModelRunner(num_blocks, BLOCK_SIZE, rig.tokenizer.vocab_size, max_model_len)
        config = EngineConfig(num_blocks=num_blocks, max_model_len=max_model_len, block_size=BLOCK_SIZE)
        self.engine = build_engine(config, runner, rig.keyer)
        self.num_cached: dict[RequestId, int] = {}
        self._rig = rig

    def warm_up(self, prompts: Iterable[BuiltPrompt] | None = None) -> None:
        for prompt in self._rig.catalog.all_warm_ups() if prompts is None else prompts:
            owner = prompt.spans[-1].fields
            assert owner.tenant is not None
            assert owner.user is not None
            self._run(CallerIdentity(owner.tenant, owner.user, owner), prompt, is_warm_up=True)

    def hits(self, caller: CallerIdentity, prompt: BuiltPrompt) -> Counter[Scope]:
        """Runs the prompt; the blocks that it took from the cache, by scope."""
        before = dict(self.engine.pool.cache.counters.hits_by_scope)
        request = self._run(caller, prompt)
        after = self.engine.pool.cache.counters.hits_by_scope
        hits = Counter({scope: after[scope] - before[scope] for scope in Scope if after[scope] > before[scope]})
        assert self.num_cached[request.request_id] == hits.total() * BLOCK_SIZE, "two counters tell the same"
        return hits

    def _run(self, caller: CallerIdentity, prompt: BuiltPrompt, *, is_warm_up: bool = False) -> Request:
        request = Request(
            request_id=new_request_id(),
            model="fake",
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(max_tokens=1, seed=1, temperature=0.0),
            spans=prompt.spans,
            block_keys=self._rig.keys(prompt),
            tenant_hash=caller.tenant,
            user_hash=caller.user,
            use_prefix_cache=prompt.use_prefix_cache,
        )
        self.engine.add_request(request, is_warm_up=is_warm_up)
        while self.engine.has_work:
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                if output.num_cached_tokens is not None:
                    self.num_cached[output.request_id] = output.num_cached_tokens
        return request
