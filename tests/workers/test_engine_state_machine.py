"""Whatever arrives, leaves, collides or runs out of room: every request gets what it would get alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from engine_builders import Transcript, make_engine, make_request, user_hash
from fake_runner import FakeModelRunner, WindowedFakeRunner, reference_tokens
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cluster.api.output import FinishReason
from cluster.api.request import Request
from workers.config import Batching, IsolationCheck
from workers.scheduler import Schedule, ScheduledRow
from workers.step import StepInput, StepOutput, WindowGroup

TENANT_OF = {"alice": "acme", "bob": "globex"}
EOS = frozenset({7, 70, 170})
STEMS = [[stem * 100 + i for i in range(40)] for stem in range(3)]

seen: Counter[str] = Counter()
"""What the whole run came across. A run in which one of these never happened has proved nothing about it."""

SETTINGS: dict[str, Sequence[Any]] = {
    "num_blocks": range(14, 41),
    "max_num_seqs": range(1, 7),
    "budget": range(6, 41),
    "chunk": range(1, 21),
    "batching": [Batching.CONTINUOUS, Batching.CONTINUOUS, Batching.STATIC],
    "prefix_caching": [True, True, True, False],
    "poison": [math.nan, 12345.0],
    "window": [None, None, 1, 4, 11],
    "spare_pages": range(13),
    "seed": range(2**32),
}
ARRIVAL: dict[str, Sequence[Any]] = {
    "stem": range(3),
    "stem_len": range(41),
    "tail_len": range(1, 10),
    "max_tokens": range(1, 15),
    "user": ["alice", "bob"],
    "n": [1, 1, 1, 2, 3],
    "temperature": [0.0, 1.0],
    "min_tokens": range(4),
    "num_emitted": range(7),
    "logprobs": [None, 2],
    "repeat": range(1, 4),
}


def any_of(choices: dict[str, Sequence[Any]]) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.sampled_from(values) for name, values in choices.items()}


def count(step: StepInput) -> None:
    seen["shared steps"] += len(step.rows) > 1
    seen["copies on write"] += len(step.block_copies)
    seen["closed windows"] += any(row.window_start for row in step.rows)


class ShuffledRunner(FakeModelRunner):
    """Counts what the steps contain; its tokens are the fake's."""

    def execute(self, step: StepInput) -> StepOutput:
        count(step)
        return super().execute(step)


class ShuffledWindowedRunner(WindowedFakeRunner):
    def execute(self, step: StepInput) -> StepOutput:
        count(step)
        return super().execute(step)


class EngineMachine(RuleBasedStateMachine):
    @initialize(**any_of(SETTINGS))
    def start(
        self, num_blocks, max_num_seqs, budget, chunk, batching, prefix_caching, poison, window, spare_pages, seed
    ) -> None:
        self.window = window
        runner = ShuffledRunner(num_blocks=num_blocks, eos_token_ids=EOS)
        budget = max(budget, max_num_seqs)
        if window is not None:
            num_pages = WindowGroup(window, 0, 0).pages_alone(budget, 4) + 1 + spare_pages
            runner = ShuffledWindowedRunner(window, num_pages, num_blocks, eos_token_ids=EOS)
        self.engine = make_engine(
            runner=runner,
            num_blocks=num_blocks,
            max_model_len=400,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_shared_chunk_tokens=chunk,
            batching=batching,
            prefix_caching=prefix_caching,
            isolation_check=IsolationCheck.POISON,
            poison_value=poison,
            max_pinned_fraction=0.0,
        )
        self.room = num_blocks * 4
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.transcript = Transcript()
        self.random = random.Random(seed)
        # The pool hands out blocks in any order: results must not depend on which.
        self.random.shuffle(self.engine.pool._free)

    @rule(**any_of(ARRIVAL))
    def arrive(self, stem, stem_len, tail_len, num_emitted, repeat, **sampling) -> None:
        prompt = [*STEMS[stem][:stem_len], *(self.random.randint(300, 303) for _ in range(tail_len))]
        if len(prompt) + sampling["max_tokens"] > self.room:
            return
        sampling["tenant"] = TENANT_OF[sampling["user"]]
        for _ in range(repeat):  # equal prefixes in one step
            request = make_request(prompt, seed=self.random.getrandbits(63), **sampling)
            full = self.expected(request)
            if num_emitted and all(len(tokens) > num_emitted for tokens in full):
                emitted = tuple(tuple(tokens[:num_emitted]) for tokens in full)
                request = make_request(prompt, seed=request.sampling.seed, emitted=emitted, **sampling)
                seen["resumed"] += 1
            self.engine.add_request(request)
            self.requests[request.request_id] = request

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps) -> None:
        for _ in range(num_steps):
            self.transcript.add(self.engine.step())

    @rule()
    def abort_one(self) -> None:
        live = [r for r in self.requests if r not in self.transcript.finished and r not in self.aborted]
        if live:
            victim = self.random.choice(live)
            self.engine.abort(self.requests[victim].request_id)
            self.aborted.add(victim)
            seen["aborts"] += 1

    @rule(user=st.sampled_from(["alice", "bob"]))
    def purge(self, user) -> None:
        seen["purged blocks"] += self.engine.purge_user(user_hash(TENANT_OF[user], user))

    @invariant()
    def is_isolated(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.violations == []

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            self.transcript.add(self.engine.step())
        assert sorted(self.transcript.finished) == sorted(self.requests)
        assert self.transcript.errors == {}
        for request in self.requests.values():
            self.compare(request)
        assert self.engine.pool.num_in_use == 0
        if self.engine.pool.pages is not None:
            assert self.engine.pool.pages.num_held == 0
            seen["page evictions"] += self.engine.pool.pages.num_evictions
        counters = self.engine.pool.cache.counters
        assert counters.verify_failures == 0
        seen["hits"] += counters.hits
        seen["evictions"] += counters.evictions
        seen["preemptions"] += self.engine.scheduler.num_preemptions
        seen["requests"] += len(self.requests)

    def expected(self, request: Request) -> list[list[int]]:
        return [reference_tokens(request, choice, eos=EOS, window=self.window) for choice in range(request.sampling.n)]

    def compare(self, request: Request) -> None:
        is_aborted = request.request_id in self.aborted
        for choice, full in enumerate(self.expected(request)):
            num_emitted = len(request.emitted[choice]) if request.emitted else 0
            got = self.transcript.of(request, choice)
            reason = self.transcript.reasons[request.request_id][choice]
            if is_aborted and reason is FinishReason.ABORT:
                assert got == full[num_emitted : num_emitted + len(got)]
                continue
            assert got == full[num_emitted:]
            is_stop = full[-1] in EOS and len(full) >= request.sampling.min_tokens
            assert reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)


def walk(seed: int, num_rules: int) -> None:
    """Rules drawn from one seed: what they come across is the same wherever and after whatever this runs."""
    draw = random.Random(seed)

    def one_of_each(choices: dict[str, Sequence[Any]]) -> dict[str, Any]:
        return {name: draw.choice(values) for name, values in choices.items()}

    machine = EngineMachine()
    machine.start(**one_of_each(SETTINGS))
    for _ in range(num_rules):
        match draw.choice(["arrive", "arrive", "step", "step", "abort", "purge"]):
            case "arrive":
                machine.arrive(**one_of_each(ARRIVAL))
            case "step":
                machine.step(num_steps=draw.randint(1, 6))
            case "abort":
                machine.abort_one()
            case "purge":
                machine.purge(user=draw.choice(ARRIVAL["user"]))
        machine.is_isolated()
    machine.teardown()


@pytest.mark.parametrize("num_walks", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_request_gets_what_it_gets_alone(num_walks: int) -> None:
    seen.clear()
    for seed in range(num_walks):
        walk(seed, num_rules=30)
    never = [
        name
        for name in (
            "shared steps", "copies on write", "resumed", "aborts", "purged blocks", "hits", "evictions", "preemptions",
            "closed windows", "page evictions",
        )
        if not seen[name]
    ]  # fmt: skip
    assert not never, f"void: the run never saw {never}"


def search(max_examples: int, step_count: int) -> None:
    """Where a walk finds a fault by luck, this looks for one and says it in the fewest rules. What it draws depends on
    constants of whatever is imported, so it has to see nothing in particular."""
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=step_count,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_order_of_events_changes_what_a_request_gets() -> None:
    search(max_examples=25, step_count=30)


@pytest.mark.slow
def test_no_order_of_events_changes_what_a_request_gets_at_length() -> None:
    search(max_examples=1500, step_count=50)


def test_the_machine_sees_a_foreign_block() -> None:
    """The positive control: one wrong block in one table, and the comparison fails."""

    class OffByOne(ShuffledRunner):
        def _compute(self, row):
            if row.start >= 8:
                row.block_table = [row.block_table[1], *row.block_table[1:]]
            return super()._compute(row)

    request = make_request(range(20), 6)
    engine = make_engine(runner=OffByOne())
    engine.add_request(request)
    transcript = Transcript()
    while engine.has_work:
        transcript.add(engine.step())
    assert transcript.of(request) != reference_tokens(request)


def test_a_scheduled_row_ends_where_it_says() -> None:
    engine = make_engine()
    engine.add_request(make_request(range(9)))
    schedule: Schedule = engine.scheduler.schedule()
    row: ScheduledRow = schedule.rows[0]
    assert (row.start, row.end, row.is_sampling) == (0, 9, True)
