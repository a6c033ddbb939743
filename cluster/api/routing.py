"""The question that a gateway asks the router, and the answer."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.ids import BlockKey, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """`excluded` are workers already tried; `numerics` restricts to equal workers when a stream is resumed."""

    request_id: RequestId
    model: str
    block_keys: tuple[BlockKey, ...]
    num_prompt_tokens: int
    max_tokens: int
    tenant_hash: bytes
    user_hash: bytes
    affinity_key: str | None = None  # only steers placement; never decides sharing
    deadline_unix_s: float | None = None
    excluded: tuple[WorkerId, ...] = ()
    numerics: str | None = None


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """A reservation is held until `release(request_id)`."""

    worker_id: WorkerId
    epoch: str
    replica_id: str
    numerics: str
    num_matched_blocks: int  # a hint: the worker verifies
