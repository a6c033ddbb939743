"""Draws tokens from logits, one row at a time, so that no row can feel another. Knows nothing of models or caches.

Order of work on a row: logit bias, penalties, min_tokens; then greedy, or temperature, top-k, min-p and top-p in this
order. Log-probabilities are those of the model itself, before any of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.api.sampling import SamplingParams
from workers.noise import uniform
from workers.step import SampledToken, SampleInput

Row = NDArray[np.float32]

_STRETCH = 512


class Sampler:
    """`eos_token_ids` end a sequence, and may not be drawn before `min_tokens`."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Row, inputs: Sequence[SampleInput]) -> list[SampledToken]:
        """All draws from one row of logits [vocab]; the row is left as it was."""
        return [self._draw(logits, one) for one in inputs]

    def _draw(self, logits: Row, one: SampleInput) -> SampledToken:
        params = one.params
        adjusted = self._adjust(logits, one) if self._needs_adjustment(one) else logits
        if params.is_greedy:
            token = int(adjusted.argmax())
        else:
            token = _draw_from(adjusted, params, uniform(params.seed, one.choice, one.position))
        if params.logprobs is None:
            return SampledToken(token)
        return _with_logprobs(logits, token, params.logprobs)

    def _needs_adjustment(self, one: SampleInput) -> bool:
        params = one.params
        return bool(
            params.logit_bias
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or one.position < params.min_tokens
        )

    def _adjust(self, logits: Row, one: SampleInput) -> Row:
        params = one.params
        row = logits.copy()
        for token, bias in params.logit_bias:
            row[token] += bias
        if params.repetition_penalty != 1.0:
            seen = np.unique(np.fromiter((*one.prompt_token_ids, *one.output_token_ids), dtype=np.int64))
            values = row[seen]
            factor = np.float32(params.repetition_penalty)
            row[seen] = np.where(values > 0, values / factor, values * factor)
        if (params.presence_penalty or params.frequency_penalty) and one.output_token_ids:
            seen, counts = np.unique(np.asarray(one.output_token_ids, dtype=np.int64), return_counts=True)
            row[seen] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
        if one.position < params.min_tokens:
            row[self._enders(params)] = -np.inf
        return row

    def _enders(self, params: SamplingParams) -> list[int]:
        eos: frozenset[int] = frozenset() if params.ignore_eos else self._eos_token_ids
        return sorted(eos.union(params.stop_token_ids))


def _draw_from(row: Row, params: SamplingParams, noise: float) -> int:
    """Inverse of the cumulated distribution at `noise`."""
    with np.errstate(over="ignore", under="ignore"):
        shares = np.exp((row - row.max()) / np.float32(params.temperature))
    tokens = _candidates(shares, params)
    if tokens is None:
        return _invert(shares, noise)
    return int(tokens[_invert(shares[tokens], noise)])


def _invert(shares: Row, noise: float) -> int:
    """The index at which the cumulated shares pass noise · total. Stretches are summed first, few cumulated."""
    stretch_sums = np.add.reduceat(shares, np.arange(0, len(shares), _STRETCH), dtype=np.float64)
    before = np.cumsum(stretch_sums)
    wanted = noise * before[-1]
    stretch = int(np.searchsorted(before, wanted, side="right"))
    if stretch < len(before):
        start = stretch * _STRETCH
        inside = np.cumsum(shares[start : start + _STRETCH], dtype=np.float64)
        wanted -= before[stretch - 1] if stretch else 0.0
        index = start + int(np.searchsorted(inside, wanted, side="right"))
        if index < min(start + _STRETCH, len(shares)) and shares[index] > 0:
            return index
    # Rounding pushed the sum past the end: the last token with a share takes the rest.
    last = min((stretch + 1) * _STRETCH, len(shares))
    return int(np.flatnonzero(shares[:last])[-1])


def _candidates(shares: Row, params: SamplingParams) -> NDArray[np.int64] | None:
    """Ids that top-k, min-p and top-p leave, most likely first and lower id first among equals; None = all."""
    has_top_k = 0 < params.top_k < len(shares)
    if not has_top_k and params.min_p == 0.0 and params.top_p >= 1.0:
        return None
    tokens = _most_likely(shares, params.top_k) if has_top_k else None
    if params.min_p > 0.0:  # the most likely token's share is exactly 1
        tokens = np.flatnonzero(shares >= params.min_p) if tokens is None else tokens[shares[tokens] >= params.min_p]
    if params.top_p < 1.0:
        tokens = _nucleus(shares, tokens, params.top_p)
    return tokens


def _nucleus(shares: Row, tokens: NDArray[np.int64] | None, top_p: float) -> NDArray[np.int64]:
    """The shortest most-likely-first list that holds `top_p` of the mass (of `tokens`, where given)."""
    pool = shares if tokens is None else shares[tokens]
    wanted = top_p * float(pool.sum(dtype=np.float64))
    # Sorting the whole vocabulary costs milliseconds; nearly always a few hundred tokens hold the mass.
    for floor in (1e-2, 1e-4, 1e-6, 0.0):
        chosen = np.flatnonzero(pool >= floor)
        if floor == 0.0 or float(pool[chosen].sum(dtype=np.float64)) >= wanted:
            break
    ordered = chosen[np.argsort(-pool[chosen], kind="stable")]
    cumulated = np.cumsum(pool[ordered], dtype=np.float64)
    ordered = ordered[: int(np.searchsorted(cumulated, wanted, side="left")) + 1]
    return ordered if tokens is None else tokens[ordered]


def _most_likely(values: Row, count: int) -> NDArray[np.int64]:
    """Ids of the `count` highest values, highest first, lower id first among equals."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    border = np.partition(values, len(values) - count)[len(values) - count]
    chosen = np.flatnonzero(values >= border)
    return chosen[np.argsort(-values[chosen], kind="stable")][:count]


def _with_logprobs(logits: Row, token: int, count: int) -> SampledToken:
    highest = logits.max()
    total = highest + np.log(np.exp(logits - highest).sum(dtype=np.float64))
    best = _most_likely(logits, count) if count else ()
    top = tuple((int(index), float(logits[index] - total)) for index in best)
    return SampledToken(token, float(logits[token] - total), top)
