"""The structure check, shown to see what it is for: each fault is planted through EngineParts and named in time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from engine_builders import Transcript, make_engine, make_request, run_all
from fake_runner import SECRET, ConstantKeyer, fake_identity, reference_tokens

from cluster.api.errors import InternalError
from workers.block_pool import BlockPool
from workers.build import EngineParts
from workers.config import IsolationCheck
from workers.isolation_check import IsolationChecker, ViolationKind
from workers.prefix_cache import PrefixCache
from workers.publisher import Publisher
from workers.scheduler import Scheduler
from workers.step_builder import StepBuilder


class WrongTable(StepBuilder):
    def build(self, step_id, schedule):
        step = super().build(step_id, schedule)
        if len(step.rows) > 1:
            step.rows[1].block_table = step.rows[0].block_table
        return step


class NegativeSlot(StepBuilder):
    def build_row(self, row):
        step_row = super().build_row(row)
        return replace(step_row, block_table=[-1, *step_row.block_table[1:]])


class RunningPositions(StepBuilder):
    def build(self, step_id, schedule):
        step = super().build(step_id, schedule)
        if len(step.rows) > 1:
            step.rows[1].start += step.rows[0].start
        return step


class ForeignSampling(StepBuilder):
    def build(self, step_id, schedule):
        step = super().build(step_id, schedule)
        if len(step.rows) > 1:
            step.rows[0].samples, step.rows[1].samples = step.rows[1].samples, step.rows[0].samples
        return step


class ForeignTokens(StepBuilder):
    def build(self, step_id, schedule):
        step = super().build(step_id, schedule)
        if len(step.rows) > 1:
            step.rows[1].token_ids = [0] * len(step.rows[1].token_ids)
        return step


class FreedWhileReferenced(Scheduler):
    def schedule(self):
        schedule = super().schedule()
        for row in schedule.rows:
            if len(row.seq.output_token_ids) == 5:
                self._pool.release((row.seq.block_table[-1],), row.seq.writer)
        return schedule


class WrongResumption(Scheduler):
    """A resumed sequence believes that more of it is computed than is."""

    def _start(self, seq, match, num_blocks):
        super()._start(seq, match, num_blocks)
        if seq.num_preemptions:
            seq.num_computed_tokens = min(seq.num_computed_tokens + 4, seq.num_tokens - 1)


class SharedPartialBlock(Scheduler):
    """Two choices go on writing into the one block that they were forked with."""

    def _make_writable(self, seq, schedule):
        index = seq.num_computed_tokens // self._config.block_size
        return index < len(seq.block_table) or super()._make_writable(seq, schedule)


class UnverifiedCache(PrefixCache):
    def matches(self, block, wanted, parent):
        return True


class UnverifiedPool(BlockPool):
    def __init__(self, *args):
        super().__init__(*args)
        self.cache = UnverifiedCache(self.blocks)


class PublishedEarly(Publisher):
    """Makes all blocks of a prompt findable after its first chunk."""

    def note_written(self, row):
        super().note_written(row)
        seq, parent = row.seq, row.seq.last_published
        for index in range(seq.num_published_blocks, seq.num_prompt_tokens // self._config.block_size):
            block = self._pool.blocks[seq.block_table[index]]
            if block.content is None:
                self._pool.cache.add(block, seq.content_of_block(index, self._config.block_size), parent)
            parent = block.identity


def run_faulty(parts: EngineParts, *requests, **changes) -> tuple[set[ViolationKind], Transcript]:
    engine = make_engine(parts=parts, check_conservation=False, **changes)
    transcript = Transcript()
    for request in requests:
        engine.add_request(request)
    for _ in range(200):
        if not engine.has_work:
            break
        transcript.add(engine.step())
    if engine.violations:
        assert not engine.is_healthy
        assert not engine.pool.cache.is_sharing
    return {violation.kind for violation in engine.violations}, transcript


def two_users() -> list:
    return [make_request(range(i * 50, i * 50 + 9 + i), 12, user=f"user-{i}", seed=i) for i in range(2)]


@pytest.mark.parametrize(
    ("part", "fault", "kind"),
    [
        ("step_builder", WrongTable, ViolationKind.TABLE),
        ("step_builder", NegativeSlot, ViolationKind.TABLE),
        ("step_builder", RunningPositions, ViolationKind.POSITION),
        ("step_builder", ForeignTokens, ViolationKind.POSITION),
        ("step_builder", ForeignSampling, ViolationKind.SAMPLING),
        ("scheduler", FreedWhileReferenced, ViolationKind.REUSED),
    ],
)
def test_a_planted_fault_is_named_before_it_runs(part: str, fault: type, kind: ViolationKind) -> None:
    requests = two_users()
    kinds, transcript = run_faulty(EngineParts(**{part: fault}), *requests)
    assert kind in kinds
    assert transcript.errors, "nobody was stopped"
    for request in requests:
        error = transcript.errors.get(request.request_id)
        assert error is None or isinstance(error, InternalError)
        got = transcript.of(request)
        assert got == reference_tokens(request)[: len(got)], "a contaminated token got out"


def test_the_same_requests_are_clean_without_a_fault() -> None:
    requests = two_users()
    kinds, transcript = run_faulty(EngineParts(), *requests)
    assert kinds == set()
    for request in requests:
        assert transcript.of(request) == reference_tokens(request)


def test_a_resumption_with_wrong_counts_is_named() -> None:
    requests = [make_request(range(i * 20, i * 20 + 9), 40, user=f"user-{i}") for i in range(5)]
    kinds, _ = run_faulty(
        EngineParts(scheduler=WrongResumption), *requests, num_blocks=16, max_pinned_fraction=0.0, prefix_caching=False
    )
    assert kinds == {ViolationKind.UNWRITTEN}


def test_two_writers_of_one_block_are_named() -> None:
    request = make_request(range(10), 6, n=2, temperature=1.0)
    kinds, _ = run_faulty(EngineParts(scheduler=SharedPartialBlock), request)
    assert kinds == {ViolationKind.SHARED_WRITE}


@pytest.mark.parametrize(("user", "kind"), [("bob", ViolationKind.FOREIGN), ("alice", ViolationKind.CONTENT)])
def test_a_wrong_hit_is_named_even_when_key_and_verification_are_both_broken(user: str, kind: ViolationKind) -> None:
    keyer = ConstantKeyer(SECRET, fake_identity(4))
    parts = EngineParts(block_pool=UnverifiedPool)
    first = make_request(range(6), 3, keyer=keyer)
    second = make_request(range(100, 106), 3, user=user, keyer=keyer)
    engine = make_engine(parts=parts, keyer=keyer, check_conservation=False)
    run_all(engine, first)
    transcript = run_all(engine, second)
    assert {violation.kind for violation in engine.violations} == {kind}
    assert isinstance(transcript.errors[second.request_id], InternalError)


def test_a_block_published_before_it_is_written_is_named() -> None:
    first, second = make_request(range(60), 3), make_request([*range(56), 1], 3)
    engine = make_engine(parts=EngineParts(publisher=PublishedEarly), check_conservation=False)
    transcript = Transcript()
    engine.add_request(first)
    transcript.add(engine.step())
    run_all(engine, second, transcript=transcript)
    assert {violation.kind for violation in engine.violations} == {ViolationKind.UNWRITTEN, ViolationKind.SHARED_WRITE}
    assert second.request_id in transcript.errors


class LosesBlocks(BlockPool):
    def _retire(self, block):
        if block.block_id != 3:
            super()._retire(block)


def test_a_lost_block_is_named() -> None:
    engine = make_engine(
        parts=EngineParts(block_pool=LosesBlocks), max_num_seqs=1, prefix_caching=False, check_conservation=False
    )
    transcript = run_all(engine, *two_users())
    assert [violation.kind for violation in engine.violations] == [ViolationKind.CONSERVATION], (
        "once, not in every step"
    )
    assert transcript.errors == {}, "who lost it is unknown, and nobody reads it"


def test_after_a_violation_the_others_finish_and_what_cannot_fit_is_told_so() -> None:
    engine = make_engine(parts=EngineParts(step_builder=NegativeSlot), num_blocks=8, max_pinned_fraction=0.0)
    requests = [make_request(range(10), 10, user=f"user-{i}") for i in range(6)]
    transcript = run_all(engine, *requests)
    assert set(transcript.errors) == {request.request_id for request in requests}


class SkipsABlock(Scheduler):
    """Believes that the first block of a new sequence is computed, and so reads whatever lies there."""

    def _start(self, seq, match, num_blocks):
        super()._start(seq, match, num_blocks)
        seq.num_computed_tokens = 4


class Blind(IsolationChecker):
    def check(self, step, schedule):
        return []


def tokens_of_skipped_block(mode: IsolationCheck, value: float) -> list[int]:
    parts = EngineParts(scheduler=SkipsABlock, checker=Blind)
    request = make_request(range(9), 5, use_prefix_cache=False)
    engine = make_engine(parts=parts, isolation_check=mode, poison_value=value)
    return run_all(engine, request).of(request)


@pytest.mark.parametrize("value", [math.nan, 1e6])
def test_poison_shows_what_fresh_memory_hides(value: float) -> None:
    unseen = tokens_of_skipped_block(IsolationCheck.CHECK, value)
    assert tokens_of_skipped_block(IsolationCheck.POISON, value) != unseen
    assert tokens_of_skipped_block(IsolationCheck.POISON, 0.0) == unseen, "the pair: fresh memory is zero"


def test_poison_fills_each_block_before_its_first_use_and_after_its_last() -> None:
    engine = make_engine(isolation_check=IsolationCheck.POISON, poison_value=77.0, prefix_caching=False)
    run_all(engine, make_request(range(10), 4))
    engine.add_request(make_request(range(5), 1))
    engine.step()
    table = engine.runner.steps[-1].rows[0].block_table
    written = {(table_id, slot) for table_id in table for slot in range(4)}
    untouched = [int(engine.runner.kv[b, s]) for b in range(64) for s in range(4) if (b, s) not in written]
    assert set(untouched) == {77}


class SwapsInAForeignBlock(Scheduler):
    """Replaces a block that was checked long ago by one of somebody else's."""

    def schedule(self):
        schedule = super().schedule()
        victims = [row.seq for row in schedule.rows if len(row.seq.output_token_ids) == 5]
        if len(victims) == 2:
            foreign = self._pool.blocks[victims[0].block_table[0]]
            self._pool.share(foreign, victims[1].writer)
            victims[1].block_table[0] = foreign.block_id
        return schedule


def test_a_foreign_block_in_a_place_that_was_in_order_before_is_named() -> None:
    kinds, transcript = run_faulty(EngineParts(scheduler=SwapsInAForeignBlock), *two_users())
    assert kinds == {ViolationKind.FOREIGN}
    assert len(transcript.errors) == 1
