"""A model runner whose next token is a hash of the KV contents that it reaches through the block table.

It keeps one integer per KV slot. The value written at a position depends on the token, the position and everything
read before it, as a transformer's K and V do; so a wrong, stale, poisoned or unwritten block changes every later token.
`reference_tokens` computes the same without blocks: what the request gives alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from cache_service.block_key import BlockKeyer, ModelIdentity
from cluster.api.errors import NotFoundError
from cluster.api.ids import BlockKey
from cluster.api.request import Request
from cluster.api.sampling import SamplingParams
from cluster.api.scope import ScopeFields
from workers.step import SampledToken, SampleInput, StepInput, StepOutput, StepRow, WindowGroup

MASK = (1 << 64) - 1
SECRET = b"fake cluster secret, 32 bytes!!!"


def mix(value: int) -> int:
    """SplitMix64's finaliser."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def weight(position: int) -> int:
    return mix(position * 0x9E3779B97F4A7C15 + 1) | 1


def slot_value(token_id: int, position: int, context: int, adapter: str | None) -> int:
    salt = sum(adapter.encode()) if adapter else 0
    return mix(context + token_id * 0xD1342543DE82EF95 + position * 0x2545F4914F6CDD1D + salt)


def draw(context: int, params: SamplingParams, choice: int, position: int, vocab: int, eos: frozenset[int]) -> int:
    noise = 0 if params.is_greedy else mix(params.seed + choice * 7919 + position * 104729)
    token = mix(context ^ noise) % vocab
    while position < params.min_tokens and token in eos:
        token = (token + 1) % vocab
    return token


def fake_identity(block_size: int, model: str = "fake") -> ModelIdentity:
    return ModelIdentity(model, b"fake weights", "int64", "fake", block_size)


class FakeModelRunner:
    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 997,
        max_model_len: int = 512,
        eos_token_ids: frozenset[int] = frozenset(),
        adapters: Sequence[str] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.numerics = "fake"
        self.window: WindowGroup | None = None
        self.identity = fake_identity(block_size)
        self.kv = np.zeros((num_blocks, block_size), dtype=np.uint64)
        self.steps: list[StepInput] = []  # the last ones, for assertions
        self.num_filled = 0
        self._weights = np.array([weight(p) for p in range(max_model_len + 1)], dtype=np.uint64)
        self._adapters = frozenset(adapters)

    def execute(self, step: StepInput) -> StepOutput:
        for source, target in step.block_copies:
            self.kv[target] = self.kv[source]
        # All reads before all writes would hide an order dependence; all writes first is what one fused step does.
        contexts = [self._compute(row) for row in step.rows]
        self.steps = [*self.steps[-63:], step]
        return StepOutput(
            [
                [self._sample(context, sample) for sample in row.samples]
                for row, context in zip(step.rows, contexts, strict=True)
            ]
        )

    def _compute(self, row: StepRow) -> int:
        size = self.block_size
        table = np.asarray(row.block_table, dtype=np.int64)
        num_read = -(-row.start // size)
        read = self.kv[table[:num_read]].reshape(-1)[: row.start]
        context = int((read * self._weights[: row.start]).sum(dtype=np.uint64)) if row.start else 0
        for offset, token_id in enumerate(row.token_ids):
            position = row.start + offset
            value = slot_value(token_id, position, context, row.adapter)
            self.kv[row.block_table[position // size], position % size] = value
            context = (context + value * weight(position)) & MASK
        return context

    def _sample(self, context: int, sample: SampleInput) -> SampledToken:
        token = draw(context, sample.params, sample.choice, sample.position, self.vocab_size, self.eos_token_ids)
        if sample.params.logprobs is None:
            return SampledToken(token)
        top = tuple((mix(context + i) % self.vocab_size, -1.0 - i) for i in range(sample.params.logprobs))
        return SampledToken(token, -(context % 1000) / 1000, top)

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        self.num_filled += len(block_ids)
        self.kv[list(block_ids)] = 0x7FF8DEAD if math.isnan(value) else int(value)

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        return [int((self.kv[b] * self._weights[: self.block_size]).sum(dtype=np.uint64)) for b in block_ids]

    def release_adapters(self, in_use: Set[bytes]) -> None:
        pass

    def adapter_digest(self, adapter: str | None) -> bytes | None:
        if adapter is None:
            return None
        if adapter not in self._adapters:
            raise NotFoundError("no such adapter", param="model")
        return adapter.encode()


class WindowedFakeRunner(FakeModelRunner):
    """Half of its memory forgets: a position also depends on a second value of each of the last `window` positions,
    itself included, which lies in a page and nowhere else."""

    def __init__(self, window: int, num_pages: int, num_blocks: int = 64, **settings: Any) -> None:
        super().__init__(num_blocks=num_blocks, **settings)
        self.window = WindowGroup(window, num_pages, num_blocks)
        self.page_kv = np.zeros((num_pages, self.block_size), dtype=np.uint64)

    def execute(self, step: StepInput) -> StepOutput:
        for source, target in step.page_copies:
            self.page_kv[target] = self.page_kv[source]
        return super().execute(step)

    def _compute(self, row: StepRow) -> int:
        assert self.window is not None
        size, window = self.block_size, self.window.num_tokens
        pages = [0] * row.window_start + list(row.window_pages)
        num_read = -(-row.start // size)
        read = self.kv[np.asarray(row.block_table, dtype=np.int64)[:num_read]].reshape(-1)[: row.start]
        before = int((read * self._weights[: row.start]).sum(dtype=np.uint64)) if row.start else 0
        recent = [
            int(self.page_kv[pages[at // size], at % size]) for at in range(max(0, row.start - window + 1), row.start)
        ]
        for position, token_id in enumerate(row.token_ids, row.start):
            seen = recent[-(window - 1) :] if window > 1 else []
            value = slot_value(token_id, position, windowed_context(before, seen), row.adapter)
            self.kv[row.block_table[position // size], position % size] = value
            self.page_kv[pages[position // size], position % size] = mix(value)
            before = (before + value * weight(position)) & MASK
            recent.append(mix(value))
        return windowed_context(before, recent[-window:])

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        super().fill_blocks([one for one in block_ids if one < self.num_blocks], value)
        pages = [one - self.num_blocks for one in block_ids if one >= self.num_blocks]
        self.page_kv[pages] = 0x7FF8DEAD if math.isnan(value) else int(value)

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        rows = [self.kv[b] if b < self.num_blocks else self.page_kv[b - self.num_blocks] for b in block_ids]
        return [int((row * self._weights[: self.block_size]).sum(dtype=np.uint64)) for row in rows]


def windowed_context(before: int, recent: Sequence[int]) -> int:
    """Of the full layers and of the last values of those with a window, the latest last."""
    return (before + sum(value * weight(7000 + back) for back, value in enumerate(reversed(recent)))) & MASK


def reference_tokens(
    request: Request,
    choice: int = 0,
    vocab_size: int = 997,
    eos: frozenset[int] = frozenset(),
    window: int | None = None,
) -> list[int]:
    """The output of one choice, computed from the definition: no blocks, no batch, no cache."""
    if window is not None:
        return _windowed_tokens(request, choice, vocab_size, eos, window)
    context = 0
    output: list[int] = []
    position = 0
    params = request.sampling
    tokens = list(request.prompt_token_ids)
    while True:
        for token_id in tokens:
            value = slot_value(token_id, position, context, request.adapter)
            context = (context + value * weight(position)) & MASK
            position += 1
        token = draw(context, params, choice, len(output), vocab_size, eos)
        output.append(token)
        is_stop = (token in eos and not params.ignore_eos) or token in params.stop_token_ids
        if (is_stop and len(output) >= params.min_tokens) or len(output) == params.max_tokens:
            return output
        tokens = [token]


def _windowed_tokens(request: Request, choice: int, vocab_size: int, eos: frozenset[int], window: int) -> list[int]:
    values: list[int] = []
    before = 0
    output: list[int] = []
    params = request.sampling
    tokens = list(request.prompt_token_ids)
    while True:
        for token_id in tokens:
            recent = [mix(value) for value in values[max(0, len(values) - window + 1) :]] if window > 1 else []
            value = slot_value(token_id, len(values), windowed_context(before, recent), request.adapter)
            before = (before + value * weight(len(values))) & MASK
            values.append(value)
        context = windowed_context(before, [mix(value) for value in values[-window:]])
        token = draw(context, params, choice, len(output), vocab_size, eos)
        output.append(token)
        is_stop = (token in eos and not params.ignore_eos) or token in params.stop_token_ids
        if (is_stop and len(output) >= params.min_tokens) or len(output) == params.max_tokens:
            return output
        tokens = [token]


class ConstantKeyer(BlockKeyer):
    """The worst hash: every block has the same key."""

    def child(
        self,
        parent: BlockKey | None,
        fields: ScopeFields,
        token_ids: Sequence[int],
        adapter_digest: bytes | None = None,
    ) -> BlockKey:
        return BlockKey(bytes(32))
