"""Proves at start, on this machine and at the model's own shapes, that a row's bits do not depend on the batch.

First every product alone, over many row counts up to the token budget; then whole steps: one prompt in one piece, in
chunks, and among others, over permuted blocks. Where products differ by row count, a fixed number of rows per call is
tried; where that does not help either, bit-exact mode is off and the report says why.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.api.sampling import SamplingParams
from workers.forward_model import ForwardModel
from workers.kv_cache import KVCache
from workers.model.batch import build_batch
from workers.model.linear import Product
from workers.step import SampleInput, StepRow

logger = logging.getLogger(__name__)

ROW_TILES = (16, 32, 64)
_SMALL_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 31, 32, 33, 48)
_LARGE_COUNTS = (63, 64, 65, 96, 127, 128, 129, 200, 255, 257, 512, 1000, 1024, 2048, 4096, 8192)
_MOST_SAMPLE_ROWS = 64  # the lm_head is the largest product: tested up to here
_CHUNKS = ((97,), (1, 96), (16, 17, 64), (95, 1, 1), (33, 64))


@dataclass(frozen=True)
class SelfTestReport:
    """`failures` is empty exactly when bit-exact mode holds."""

    row_tile: int | None
    variant_counts: dict[str, tuple[int, ...]]  # per product: the row counts that gave other bits
    failures: tuple[str, ...]
    duration_s: float
    step_digest: str  # of the logits of one fixed step: equal machines give equal ones

    @property
    def is_bit_exact(self) -> bool:
        return not self.failures


def run_self_test(
    model: ForwardModel, block_size: int, max_tokens: int, max_samples: int, *, may_tile: bool = True
) -> SelfTestReport:
    """Sets the model's row tile where one is needed. Never raises for a machine that fails: it reports."""
    started = time.perf_counter()
    variant: dict[str, tuple[int, ...]] = {}
    for name, (in_size, product) in model.row_products().items():
        most = min(max_samples, _MOST_SAMPLE_ROWS) if name == "lm_head" else max_tokens
        variant[name] = _variant_counts(product, _inputs(most, in_size, model.dtype))
    if any(variant.values()) and may_tile:
        model.row_tile.rows = _find_tile(model)
    failures = [] if model.row_tile.rows else [f"{name} at rows {counts}" for name, counts in variant.items() if counts]
    step_failures, digest = _check_steps(model, block_size, min(97, max_tokens))
    report = SelfTestReport(
        row_tile=model.row_tile.rows,
        variant_counts=variant,
        failures=(*failures, *step_failures),
        duration_s=time.perf_counter() - started,
        step_digest=digest,
    )
    if not report.is_bit_exact:
        logger.error("BIT-EXACT MODE IS OFF: outputs may depend on the batch (%s)", "; ".join(report.failures))
    return report


def felt_products(products: dict[str, tuple[int, Product]], model: ForwardModel, max_tokens: int) -> list[str]:
    """Names of those whose rows feel one another, called as the model calls them: for what is added after the start."""
    tile = model.row_tile.rows
    if tile is None:
        return [
            name
            for name, (size, product) in products.items()
            if _variant_counts(product, _inputs(max_tokens, size, model.dtype))
        ]
    return [
        name for name, (size, product) in products.items() if not _is_even(product, _inputs(tile, size, model.dtype))
    ]


def _inputs(rows: int, in_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, in_size, generator=generator).to(dtype)


def _variant_counts(product: Product, x: torch.Tensor) -> tuple[int, ...]:
    most = len(x)
    whole = product(x)
    counts = [count for count in (*_SMALL_COUNTS, *_LARGE_COUNTS) if count < most]
    return tuple(count for count in counts if not torch.equal(product(x[most - count :]), whole[most - count :]))


def _find_tile(model: ForwardModel) -> int | None:
    """The smallest tile in which no product minds where a row stands."""
    for rows in ROW_TILES:
        inputs = ((product, _inputs(rows, size, model.dtype)) for size, product in model.row_products().values())
        if all(_is_even(product, x) for product, x in inputs):
            return rows
    return None


def _is_even(product: Product, x: torch.Tensor) -> bool:
    """Whether the product does not mind in which place of `x` a row stands."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(len(x)))
    return torch.equal(product(x[order].contiguous()), product(x)[order])


def _check_steps(model: ForwardModel, block_size: int, length: int) -> tuple[list[str], str]:
    """Whole steps over a small pool that starts full of NaN."""
    blocks_per_row = -(-length // block_size)
    cache = KVCache(model.spec.num_layers, 4 * blocks_per_row, model.kv_block_shape(block_size), model.dtype)
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randint(0, model.spec.vocab_size, (length,), generator=generator).tolist()
    order = torch.randperm(cache.num_blocks, generator=generator).tolist()
    straight = list(range(blocks_per_row))
    reference = _prefill(model, cache, block_size, prompt, straight, (length,))
    failures = []
    for chunks in _CHUNKS[1:]:
        fitting = _fit(chunks, length)
        if not torch.equal(_prefill(model, cache, block_size, prompt, straight, fitting), reference):
            failures.append(f"a prompt in chunks {fitting}")
    others = [
        _row(prompt[:count], 0, order[blocks_per_row * index :]) for index, count in ((1, 1), (2, length), (3, 5))
    ]
    table = order[:blocks_per_row]
    if not torch.equal(_prefill(model, cache, block_size, prompt, table, (length,), others), reference):
        failures.append("a prompt among others, in permuted blocks")
    if not bool(reference.isfinite().all()):
        failures.append("logits that are not finite")
    return failures, hashlib.blake2b(reference.numpy().tobytes(), digest_size=8).hexdigest()


def _fit(chunks: Sequence[int], length: int) -> tuple[int, ...]:
    """Chunks cut to a shorter prompt, for tiny token budgets."""
    fitted, left = [], length
    for chunk in chunks:
        fitted.append(min(chunk, left))
        left -= fitted[-1]
    return tuple(chunk for chunk in (*fitted, left) if chunk)


def _prefill(
    model: ForwardModel,
    cache: KVCache,
    block_size: int,
    prompt: list[int],
    table: list[int],
    chunks: Sequence[int],
    others: Sequence[StepRow] = (),
) -> torch.Tensor:
    """The last token's logits, computed chunk by chunk; the last chunk in the middle of `others`."""
    cache.fill(range(cache.num_blocks), float("nan"))
    start = 0
    for chunk in chunks:
        row = _row(prompt[start : start + chunk], start, table)
        rows = [*others[:1], row, *others[1:]] if start + chunk == len(prompt) else [row]
        logits = model.forward(build_batch(rows, block_size, "packed", model.row_tile.pad), cache)
        start += chunk
    return logits[min(1, len(others))].clone()


def _row(token_ids: list[int], start: int, table: list[int]) -> StepRow:
    return StepRow(seq_id=0, start=start, token_ids=token_ids, block_table=table, samples=(_SAMPLE,))


# Only whether a row samples matters here.
_SAMPLE = SampleInput(SamplingParams(max_tokens=1, seed=0), 0, 0, (), ())
