"""The seam between the front door and whatever makes tokens: a cluster, an engine in this process, or a fake."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from cluster.api.output import RequestOutput
from cluster.api.request import Request


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the front door must know of a served model to validate a request."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    adapters: tuple[str, ...] = ()


@dataclass(slots=True)
class Placement:
    """Filled in by the backend while a request runs; shown to operators."""

    worker_id: str | None = None
    num_resumes: int = 0


class Backend(Protocol):
    def generate(
        self, request: Request, *, affinity_key: str | None = None, placement: Placement | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams until `finished`. Raises WatchwordError. Closing the iterator aborts the request everywhere."""
        ...

    async def is_ready(self) -> bool:
        """True when at least one worker can answer."""
        ...
