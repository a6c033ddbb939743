"""Builders with defaults, so that a test says only what it is about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fake_runner import SECRET, FakeModelRunner, fake_identity

from cache_service.block_key import BlockKeyer
from cluster.api.errors import WatchwordError
from cluster.api.ids import RequestId
from cluster.api.output import FinishReason, RequestOutput
from cluster.api.request import Request
from cluster.api.sampling import SamplingParams
from cluster.api.scope import Scope, ScopeFields, ScopeSpan
from workers.build import EngineParts, build_engine
from workers.config import EngineConfig
from workers.engine import LLMEngine

BLOCK_SIZE = 4
KEYER = BlockKeyer(SECRET, fake_identity(BLOCK_SIZE))


def private_fields(tenant: str, user: str, salt: bytes | None = None) -> ScopeFields:
    return ScopeFields(Scope.USER, tenant_hash(tenant), user=user_hash(tenant, user), salt=salt)


def tenant_hash(tenant: str) -> bytes:
    return KEYER.identity("tenant", tenant)


def user_hash(tenant: str, user: str) -> bytes:
    return KEYER.identity("user", tenant, user)


def template_spans(num_blocks: int, tenant: str, user: str) -> tuple[ScopeSpan, ...]:
    wide = ScopeFields(Scope.TEMPLATE, tenant_hash(tenant), template=b"template digest")
    return ScopeSpan(num_blocks, wide), ScopeSpan(None, private_fields(tenant, user))


_num_requests = 0


def make_request(
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    user: str = "alice",
    tenant: str = "acme",
    request_id: str | None = None,
    spans: tuple[ScopeSpan, ...] | None = None,
    keyer: BlockKeyer = KEYER,
    emitted: tuple[tuple[int, ...], ...] = (),
    deadline_unix_s: float | None = None,
    use_prefix_cache: bool = True,
    adapter: str | None = None,
    **sampling: Any,
) -> Request:
    global _num_requests
    _num_requests += 1
    spans = spans or (ScopeSpan(None, private_fields(tenant, user)),)
    params = SamplingParams(**{"max_tokens": max_tokens, "seed": 1, "temperature": 0.0, **sampling})
    return Request(
        request_id=RequestId(request_id or f"request-{_num_requests}"),
        model="fake",
        prompt_token_ids=tuple(prompt),
        sampling=params,
        spans=spans,
        block_keys=keyer.prompt_keys(prompt, spans, adapter.encode() if adapter else None),
        tenant_hash=tenant_hash(tenant),
        user_hash=user_hash(tenant, user),
        adapter=adapter,
        deadline_unix_s=deadline_unix_s,
        use_prefix_cache=use_prefix_cache,
        emitted=emitted,
    )


def make_config(**changes: Any) -> EngineConfig:
    defaults = EngineConfig(
        num_blocks=64,
        max_model_len=200,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_shared_chunk_tokens=12,
        check_conservation=True,
    )
    return replace(defaults, **changes)


def make_engine(
    *,
    runner: FakeModelRunner | None = None,
    keyer: BlockKeyer = KEYER,
    parts: EngineParts | None = None,
    **changes: Any,
) -> LLMEngine:
    config = make_config(**changes)
    runner = runner or FakeModelRunner(num_blocks=config.num_blocks, block_size=config.block_size)
    return build_engine(config, runner, keyer, parts)


@dataclass
class Transcript:
    """What a consumer of the outputs sees."""

    tokens: dict[RequestId, dict[int, list[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    reasons: dict[RequestId, dict[int, FinishReason]] = field(default_factory=lambda: defaultdict(dict))
    cached: dict[RequestId, int] = field(default_factory=dict)
    errors: dict[RequestId, WatchwordError] = field(default_factory=dict)
    finished: list[RequestId] = field(default_factory=list)

    def add(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.finished, "news after the end"
            if output.num_cached_tokens is not None:
                assert output.request_id not in self.cached, "reported twice"
                self.cached[output.request_id] = output.num_cached_tokens
            if output.error is not None:
                self.errors[output.request_id] = output.error
            for delta in output.deltas:
                assert delta.index not in self.reasons[output.request_id], "a delta after the choice's end"
                self.tokens[output.request_id][delta.index].extend(delta.token_ids)
                if delta.finish_reason is not None:
                    self.reasons[output.request_id][delta.index] = delta.finish_reason
            if output.finished:
                self.finished.append(output.request_id)

    def of(self, request: Request, choice: int = 0) -> list[int]:
        return self.tokens[request.request_id][choice]


def run_all(engine: LLMEngine, *requests: Request, transcript: Transcript | None = None) -> Transcript:
    """Adds the requests at once and steps until nothing is left."""
    transcript = transcript or Transcript()
    for request in requests:
        engine.add_request(request)
    num_steps = 0
    while engine.has_work:
        transcript.add(engine.step())
        num_steps += 1
        assert num_steps < 20_000, "the engine makes no progress"
    return transcript
