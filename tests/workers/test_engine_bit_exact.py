"""On a real model: tokens and log probabilities are the same bits alone and in company.

Arrivals, aborts, preemptions, equal prefixes, chunks, hits, permuted blocks and poisoned memory against the request
alone on an empty engine without prefix cache. A run that has not seen each of these is void.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_builders import Transcript, make_request
from fake_runner import SECRET
from transformers import LlamaConfig, LlamaForCausalLM

from cache_service.block_key import BlockKeyer
from cluster.api.output import FinishReason, RequestOutput
from cluster.api.request import Request
from workers.build import build_engine
from workers.config import EngineConfig, IsolationCheck
from workers.engine import LLMEngine
from workers.model_loader import load_runner
from workers.model_runner import CpuModelRunner
from workers.runner_config import RunnerConfig
from workers.sequence import SequenceStatus

BLOCK_SIZE = 16
TENANT_OF = {"alice": "acme", "bob": "globex"}
NUM_BLOCKS = 24
Answer = list[tuple[int, float, tuple[tuple[int, float], ...]]]


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_runner(model: Path | None, dtype: str, layout: str = "packed") -> CpuModelRunner:
    return load_runner(
        RunnerConfig(
            model=str(model) if model else None,
            dtype=dtype,
            layout=layout,
            num_blocks=NUM_BLOCKS,
            kv_cache_bytes=None,
            max_num_batched_tokens=128,
            max_num_seqs=8,
            threads=1 if model else None,
        )
    )


class Recorder(Transcript):
    """Also keeps the bits of every log probability."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[tuple[str, int], Answer] = {}

    def add(self, outputs: list[RequestOutput]) -> None:
        super().add(outputs)
        for output in outputs:
            for delta in output.deltas:
                entries = self.answers.setdefault((output.request_id, delta.index), [])
                entries.extend((entry.token_id, entry.logprob, entry.top) for entry in delta.logprobs or ())


class Company:
    """A busy engine, and what happened in it."""

    def __init__(self, runner: CpuModelRunner, seed: int, poison: float) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.keyer = BlockKeyer(SECRET, runner.identity)
        self.config = EngineConfig(
            num_blocks=NUM_BLOCKS,
            max_model_len=400,
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            max_shared_chunk_tokens=24,
            isolation_check=IsolationCheck.POISON,
            poison_value=poison,
            max_pinned_fraction=0.0,
            check_conservation=True,
        )
        self.seen: Counter[str] = Counter()
        self.stems = [[self.random.randrange(runner.vocab_size) for _ in range(120)] for _ in range(3)]

    def request(self) -> Request:
        rng = self.random
        num_stem = max(1, rng.choice([16, 32, 48, 96]) + rng.choice([-1, 0, 1]))  # around block boundaries
        tail = [rng.randrange(self.runner.vocab_size) for _ in range(rng.randrange(3))]
        user = rng.choice(["alice", "bob"])
        return make_request(
            [*rng.choice(self.stems)[:num_stem], *tail],
            rng.randrange(3, 60),
            user=user,
            tenant=TENANT_OF[user],
            keyer=self.keyer,
            n=rng.choice([1, 1, 1, 2]),
            temperature=rng.choice([0.0, 0.8]),
            seed=rng.getrandbits(63),
            top_k=rng.choice([0, 5]),
            presence_penalty=rng.choice([0.0, 0.5]),
            logprobs=rng.choice([1, 3]),
            ignore_eos=True,
        )

    def run(self, num_requests: int) -> tuple[list[Request], Recorder]:
        engine = build_engine(self.config, self.runner, self.keyer)
        self.random.shuffle(engine.pool._free)
        recorder, requests = Recorder(), []
        while len(requests) < num_requests or engine.has_work:
            while len(requests) < num_requests and len(engine.scheduler.waiting) < 4:
                request = self.request()
                engine.add_request(request)
                requests.append(request)
            if self.random.random() < 0.03:
                engine.abort(self.random.choice(requests).request_id)
            queue = list(engine.scheduler.waiting)
            recorder.add(engine.step())
            still = [seq.status for seq in queue if seq.status is not SequenceStatus.FINISHED]
            waits = [status is not SequenceStatus.RUNNING for status in still]
            self.seen["overtakings by another tenant"] += waits != sorted(waits)
            self.seen["shared steps"] += len(engine.scheduler.running) > 1
            self.seen["chunk splits"] += any(
                0 < seq.num_computed_tokens < seq.num_prompt_tokens for seq in engine.scheduler.running
            )
        self.note(engine, recorder)
        assert engine.violations == []
        return requests, recorder

    def note(self, engine: LLMEngine, recorder: Recorder) -> None:
        self.seen["preemptions"] += engine.scheduler.num_preemptions
        self.seen["evictions"] += engine.pool.cache.counters.evictions
        for num_cached in recorder.cached.values():
            self.seen[f"hits of {num_cached // BLOCK_SIZE} blocks"] += num_cached > 0
        reasons = [reason for of_choice in recorder.reasons.values() for reason in of_choice.values()]
        self.seen["aborts"] += reasons.count(FinishReason.ABORT)

    def alone(self, request: Request) -> Recorder:
        config = replace(self.config, prefix_caching=False, isolation_check=IsolationCheck.OFF)
        engine = build_engine(config, self.runner, self.keyer)
        engine.add_request(request)
        recorder = Recorder()
        while engine.has_work:
            recorder.add(engine.step())
        return recorder

    def differences(self, requests: list[Request], recorder: Recorder) -> list[str]:
        found = []
        for request in requests:
            alone = self.alone(request)
            for choice in range(request.sampling.n):
                got = recorder.answers.get((request.request_id, choice), [])
                if got != alone.answers[request.request_id, choice][: len(got)]:
                    found.append(f"{request.request_id} choice {choice}")
                is_aborted = recorder.reasons[request.request_id][choice] is FinishReason.ABORT
                assert is_aborted or len(got) == request.sampling.max_tokens
        return found


NEEDED = (
    "shared steps",
    "overtakings by another tenant",
    "chunk splits",
    "preemptions",
    "evictions",
    "aborts",
    "hits of 1 blocks",
    "hits of 2 blocks",
)


def check_company(company: Company, num_requests: int) -> None:
    requests, recorder = company.run(num_requests)
    assert [name for name in NEEDED if not company.seen[name]] == [], f"void: {dict(company.seen)}"
    assert company.differences(requests, recorder) == []


@pytest.mark.parametrize(
    ("layout", "poison"), [("packed", 1e4), ("packed", math.nan), ("padded", math.nan), ("padded", 1e4)]
)
def test_company_changes_no_bit(tiny_llama: Path, layout: str, poison: float) -> None:
    check_company(Company(make_runner(tiny_llama, "bfloat16", layout), seed=5, poison=poison), num_requests=60)


def test_a_wrong_block_changes_bits(tiny_llama: Path) -> None:
    """The positive control: the comparison sees one wrong block in one table of one step."""
    company = Company(make_runner(tiny_llama, "bfloat16"), seed=5, poison=0.0)

    class WrongBlockOnce:
        def __init__(self, inner: CpuModelRunner) -> None:
            self.inner, self.num_wrong = inner, 0

        def __getattr__(self, name: str):
            return getattr(self.inner, name)

        def execute(self, step):
            rows = [row for row in step.rows if row.start >= 32]
            if rows and not self.num_wrong:
                self.num_wrong += 1
                # Twice the second block. Not the two swapped, since keys carry their positions and attention does not
                # mind the order; nor somebody else's first block, which may hold the same words.
                rows[0].block_table = [rows[0].block_table[1], *rows[0].block_table[1:]]
            return self.inner.execute(step)

    faulty = WrongBlockOnce(company.runner)
    company.runner = faulty
    requests, recorder = company.run(12)
    company.runner = faulty.inner
    assert faulty.num_wrong == 1
    assert company.differences(requests, recorder) != []


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.timeout(7200)
def test_company_changes_no_bit_on_real_weights() -> None:
    check_company(Company(make_runner(None, "bfloat16"), seed=9, poison=math.nan), num_requests=2000)
