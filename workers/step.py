"""The plain record that passes from scheduler to model runner, and back.

The scheduler thinks in integers, the runner in tensors; neither sees the other's world.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from cache_service.block_key import ModelIdentity
from cluster.api.sampling import SamplingParams


@dataclass(slots=True)
class SampleInput:
    """One token to draw from a row's last logits. A row has several of them only when n > 1 choices start together."""

    params: SamplingParams
    choice: int
    position: int  # 0-based output position of the token to draw: the counter of the noise
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(slots=True)
class StepRow:
    """One sequence's share of a step: `token_ids` at positions start … start + len(token_ids) - 1."""

    seq_id: int
    start: int  # tokens already in the KV cache
    token_ids: Sequence[int]
    block_table: Sequence[int]  # physical block ids that cover start + len(token_ids) tokens
    samples: tuple[SampleInput, ...] = ()  # empty unless this chunk ends at the sequence's last known token
    adapter: str | None = None
    adapter_digest: bytes | None = None  # what computes: a row goes on with it when its name gets other content
    # Where the runner has a WindowGroup: the pages of the table's blocks from `window_start` on, as far as needed
    window_start: int = 0
    window_pages: Sequence[int] = ()


@dataclass(slots=True)
class StepInput:
    """A batch. Order of rows carries no meaning: results must not depend on it, bit for bit."""

    step_id: int
    rows: list[StepRow]
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target), done before the step
    page_copies: list[tuple[int, int]] = field(default_factory=list)  # the same blocks in the sliding-window layers

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(slots=True)
class SampledToken:
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class StepOutput:
    """`sampled[i]` belongs to `rows[i]` and is aligned with its `samples`."""

    sampled: list[list[SampledToken]]


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """The layers whose rows see only the last `num_tokens` tokens: their K and V lie in pages of their own.

    Page 0 is nobody's and stays zero: it stands for what has left the window. In `fill_blocks` and `checksum_blocks`
    page p goes by the id first_id + p.
    """

    num_tokens: int
    num_pages: int
    first_id: int

    def pages_alone(self, max_step_tokens: int, block_size: int) -> int:
        """The most that one sequence holds at a time: a window, a step's tokens, the ragged blocks at both ends."""
        return -(-(self.num_tokens + max_step_tokens) // block_size) + 2


class ModelRunner(Protocol):
    """Owns all tensors: weights, the KV pool, the step. Knows nothing of requests, users or caching."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def identity(self) -> ModelIdentity: ...
    @property
    def window(self) -> WindowGroup | None:
        """None where all layers keep every token, or where keeping less would save nothing."""
        ...

    @property
    def numerics(self) -> str:
        """Digest of everything that decides the bits: ISA, torch, threads, dtype, kernel, self-test."""
        ...

    def execute(self, step: StepInput) -> StepOutput:
        """Does the block copies, computes all rows, writes their K and V in place, and samples."""
        ...

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        """Overwrites whole blocks in every layer (zeroing, poisoning)."""
        ...

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        """64-bit checksum of each block's K and V bytes over all layers."""
        ...

    def release_adapters(self, in_use: Set[bytes]) -> None:
        """Frees what goes by no name any more, unless it is in use."""
        ...

    def adapter_digest(self, adapter: str | None) -> bytes | None:
        """Content digest of a loaded adapter; None for the base model. Raises NotFoundError for an unknown name."""
        ...
