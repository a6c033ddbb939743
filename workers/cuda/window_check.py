"""Do layers that keep only their window give the bits of layers that keep everything? Asked of the device at hand.

Requests with equal beginnings go through an engine that has too few blocks and pages for them, with stale memory
overwritten before each step; then each alone through an engine in which every layer keeps every block.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cache_service.block_key import BlockKeyer
from cluster.api.ids import RequestId
from cluster.api.request import Request
from cluster.api.sampling import SamplingParams
from cluster.api.scope import Scope, ScopeFields, ScopeSpan
from workers.build import EngineParts, build_engine
from workers.config import EngineConfig, IsolationCheck
from workers.cuda.decode import Capture, DecodeSteps
from workers.cuda.kv_cache import make_pool
from workers.cuda.model_runner import CudaModelRunner
from workers.cuda.triton_model import TritonModel
from workers.engine import LLMEngine
from workers.kv_layout import plan_pool
from workers.model_source import ModelSource
from workers.runner_config import RunnerConfig

Answer = list[tuple[int, float | None]]  # (token, log probability where it was asked for)


@dataclass(frozen=True)
class TrialSizes:
    """In tokens and blocks. The requests together must need more blocks than there are, each alone fewer."""

    lengths: tuple[tuple[int, int], ...]  # (prompt, output) of each request
    num_blocks: int
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 4

    @property
    def max_model_len(self) -> int:
        return max(prompt + output for prompt, output in self.lengths)


def compare_windows(
    model: TritonModel, sizes: TrialSizes, capture: Capture, parts: EngineParts | None = None
) -> dict[str, Any]:
    """`parts` are those of the engine that forgets. `void` names what should have happened and did not."""
    forgetting, keeping = (make_runner(model, sizes, fraction, capture) for fraction in (0.5, 1.0))
    assert forgetting.window is not None, "windows so wide, or a pool so small, that nothing is saved"
    keyer = BlockKeyer(bytes(32), forgetting.identity)
    requests = make_requests(sizes, keyer, model.spec.vocab_size)
    engine = build_engine(engine_config(sizes, IsolationCheck.POISON), forgetting, keyer, parts)
    together = answers_of(engine, requests)
    config = engine_config(sizes, IsolationCheck.OFF, prefix_caching=False)
    alone: dict[str, Answer] = {}
    for request in requests:
        alone |= answers_of(build_engine(config, keeping, keyer), [request])
    counts = count_events(engine)
    different = [request_id for request_id, answer in alone.items() if together.get(request_id) != answer]
    violations = sorted({violation.kind.value for violation in engine.violations})
    void = [name for name, count in counts.items() if not count]
    ok = not (different or violations or void)
    return {"ok": ok, "different": different, "violations": violations, "void": void, **counts}


def count_events(engine: LLMEngine) -> dict[str, int]:
    """Of each, none would mean that nothing was tried."""
    pages = engine.pool.pages
    assert pages is not None
    return {
        "preemptions": engine.scheduler.num_preemptions,
        "page_evictions": pages.num_evictions,
        "pages_used_again": sum(max(0, lives - 1) for lives in pages.lives),
    }


def make_runner(model: TritonModel, sizes: TrialSizes, window_fraction: float, capture: Capture) -> CudaModelRunner:
    """A KV pool and captured decode steps of its own over the model's weights."""
    config = RunnerConfig(
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        window_fraction=window_fraction,
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
    )
    windows = [layer.window for layer in model.spec.layers]
    shape = model.kv_block_shape(sizes.block_size)
    plan = plan_pool(config, windows, torch.Size(shape).numel() * model.dtype.itemsize, None)
    cache = make_pool(plan, windows, shape, model.dtype, model.device)
    blocks_per_row = -(-sizes.max_model_len // sizes.block_size)
    decode = DecodeSteps(model, cache, sizes.max_num_seqs, blocks_per_row, capture)
    return CudaModelRunner(config, model, cache, ModelSource(Path(), None, "random", bytes(32)), "check", (), decode)


def make_requests(sizes: TrialSizes, keyer: BlockKeyer, vocab_size: int) -> list[Request]:
    """Two users, each with one text of which the prompts are beginnings. Half of the answers carry log probabilities,
    so their rows are read back; of the others the tokens are drawn on the device."""
    draw = random.Random(3)
    longest = max(prompt for prompt, _ in sizes.lengths)
    texts = [[draw.randrange(vocab_size) for _ in range(longest)] for _ in range(2)]
    tenant = bytes(keyer.identity("tenant", "check"))
    requests = []
    for number, (num_prompt, num_output) in enumerate(sizes.lengths):
        user = bytes(keyer.identity("user", "check", str(number % 2)))
        spans = (ScopeSpan(None, ScopeFields(Scope.USER, tenant, user=user)),)
        prompt = tuple(texts[number % 2][:num_prompt])
        sampling = SamplingParams(
            max_tokens=num_output,
            seed=number,
            temperature=0.0 if number % 3 else 0.8,
            logprobs=1 if number // 2 % 2 == 0 else None,
            ignore_eos=True,
        )
        keys = keyer.prompt_keys(prompt, spans)
        requests.append(Request(RequestId(f"check-{number}"), "random", prompt, sampling, spans, keys, tenant, user))
    return requests


def engine_config(sizes: TrialSizes, check: IsolationCheck, *, prefix_caching: bool = True) -> EngineConfig:
    return EngineConfig(
        num_blocks=sizes.num_blocks,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        isolation_check=check,
        prefix_caching=prefix_caching,
        max_pinned_fraction=0.0,
    )


def answers_of(engine: LLMEngine, requests: Sequence[Request]) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            for delta in output.deltas:
                logprobs = [None] * len(delta.token_ids) if delta.logprobs is None else delta.logprobs
                found = answers.setdefault(output.request_id, [])
                for token_id, entry in zip(delta.token_ids, logprobs, strict=True):
                    found.append((token_id, None if entry is None else entry.logprob))
    return answers
