"""A request as it travels from gateway to worker: decided once, then frozen."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.ids import BlockKey, RequestId
from cluster.api.sampling import SamplingParams
from cluster.api.scope import ScopeSpan


@dataclass(frozen=True, slots=True)
class Request:
    """Everything a worker needs, and no raw identity or text.

    `block_keys` name the full blocks of the prompt in order. They are derived by the one function of
    cache_service/block_key.py from `prompt_token_ids` and `spans`; the engine derives keys of output blocks with it.
    `emitted` holds, per choice, token ids that another worker already produced: the engine takes them as output that
    exists (positions, penalties and counters continue) and does not emit them again.
    """

    request_id: RequestId
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    spans: tuple[ScopeSpan, ...]
    block_keys: tuple[BlockKey, ...]
    tenant_hash: bytes
    user_hash: bytes
    account_hash: bytes | None = None  # outermost of nested users: a purge of it covers all below; None: user_hash
    adapter: str | None = None
    adapter_digest: bytes | None = None  # the content that `block_keys` stand for; None: whatever the worker has
    deadline_unix_s: float | None = None
    use_prefix_cache: bool = True
    emitted: tuple[tuple[int, ...], ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
