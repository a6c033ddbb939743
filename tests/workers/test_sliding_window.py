"""Layers with a sliding window give back what no later token sees, and nobody can tell from any answer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_builders import make_engine, make_request, run_all, user_hash
from fake_runner import SECRET, WindowedFakeRunner, reference_tokens
from model_builders import make_reference, save_model
from test_engine_bit_exact import Company, Recorder

from cache_service.block_key import BlockKeyer
from cluster.api.request import Request
from workers.build import EngineParts, build_engine
from workers.config import EngineConfig, IsolationCheck
from workers.engine import LLMEngine
from workers.isolation_check import ViolationKind
from workers.kv_layout import plan_pool
from workers.layout_audit import audit_layout
from workers.model_loader import load_runner
from workers.model_runner import CpuModelRunner
from workers.publisher import Publisher
from workers.runner_config import RunnerConfig
from workers.scheduler import Scheduler
from workers.sliding_window import SlidingWindow
from workers.step_builder import StepBuilder
from workers.window_pages import NO_PAGE, WindowPages

WINDOW, SIZE = 9, 4
NEEDED = ("shared steps", "chunk splits", "evictions", "page evictions", "aborts", "hits of 1 blocks")


def windowed_engine(num_pages: int = 40, parts: EngineParts | None = None, **changes) -> LLMEngine:
    runner = WindowedFakeRunner(WINDOW, num_pages, changes.get("num_blocks", 64))
    return make_engine(runner=runner, parts=parts, isolation_check=IsolationCheck.POISON, **changes)


def expected(request: Request) -> list[int]:
    return reference_tokens(request, window=WINDOW)


def drop_page(engine: LLMEngine, key: bytes) -> None:
    """As if somebody else had needed the page."""
    pages, block = engine.pool.pages, engine.pool.cache.find(key)
    pages._idle = {block.block_id: None, **pages._idle}
    pages._evict()


# --- on a real model


def make_runner(folder: Path, dtype: str, window_fraction: float, **changes) -> CpuModelRunner:
    settings = {"num_blocks": 24, "max_num_batched_tokens": 128, "max_num_seqs": 8, "threads": 1, **changes}
    return load_runner(RunnerConfig(model=str(folder), dtype=dtype, window_fraction=window_fraction, **settings))


class WindowedCompany(Company):
    """In company the layers forget; alone, what each answer is held against, they keep everything."""

    def __init__(self, runner: CpuModelRunner, keeping: CpuModelRunner, seed: int, poison: float) -> None:
        super().__init__(runner, seed, poison)
        self.keeping = keeping

    def note(self, engine: LLMEngine, recorder: Recorder) -> None:
        super().note(engine, recorder)
        self.seen["page evictions"] += engine.pool.pages.num_evictions

    def alone(self, request: Request) -> Recorder:
        runner, self.runner = self.runner, self.keeping
        try:
            return super().alone(request)
        finally:
            self.runner = runner


@pytest.mark.parametrize(("name", "dtype", "poison"), [("gemma3", "bfloat16", math.nan), ("mistral", "bfloat16", 1e4)])
def test_forgetting_changes_no_bit(tmp_path: Path, name: str, dtype: str, poison: float) -> None:
    changes = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3" else {}
    save_model(tmp_path, make_reference(name, **changes))
    runner, keeping = (make_runner(tmp_path, dtype, fraction) for fraction in (0.5, 1.0))
    assert runner.window is not None
    assert keeping.window is None
    company = WindowedCompany(runner, keeping, seed=5, poison=poison)
    requests, recorder = company.run(30)
    assert [name for name in NEEDED if not company.seen[name]] == [], f"void: {dict(company.seen)}"
    assert company.differences(requests, recorder) == []


def test_the_pool_holds_more_blocks_for_the_same_memory(tmp_path: Path) -> None:
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    save_model(tmp_path, make_reference("gemma3", num_hidden_layers=6, layer_types=layers))
    budget = {"num_blocks": None, "kv_cache_bytes": 8 << 20}
    forgetting, keeping = (make_runner(tmp_path, "bfloat16", fraction, **budget) for fraction in (0.25, 1.0))
    used = [runner._cache.data.numel() * 2 for runner in (forgetting, keeping)]
    assert max(used) <= 8 << 20
    assert min(used) > (8 << 20) * 0.99
    assert forgetting.num_blocks > 2.6 * keeping.num_blocks


def test_the_layout_audit_finds_nothing_to_say(tmp_path: Path) -> None:
    save_model(tmp_path, make_reference("gemma3", layer_types=["sliding_attention", "full_attention"]))
    runner = make_runner(tmp_path, "bfloat16", 0.5)
    config = EngineConfig(num_blocks=24, max_model_len=400, max_num_batched_tokens=128, check_conservation=True)
    engine = build_engine(config, runner, BlockKeyer(SECRET, runner.identity))
    found = audit_layout(engine)
    assert (found.num_comparisons, found.position_faults, found.mask_faults, found.not_done) == (6, (), (), None)
    engine.pool.check_integrity()
    assert engine.pool.pages.num_held == 0


# --- what is kept


def test_a_long_sequence_holds_pages_of_its_window_alone() -> None:
    engine = windowed_engine(prefix_caching=False)
    request = make_request(range(60), 80)
    engine.add_request(request)
    held = []
    while engine.has_work:
        engine.step()
        held.append((engine.pool.num_in_use, engine.pool.pages.num_held))
    assert max(blocks for blocks, _ in held) == 35
    assert max(pages for _, pages in held[-70:]) <= 4, "a window of 9 tokens touches at most 4 blocks of 4"
    assert held[-1] == (0, 0)
    assert run_all(windowed_engine(), request).of(request) == expected(request)


def test_more_fits_than_if_every_block_had_a_page() -> None:
    """Four sequences of 35 blocks each through 18 pages, without one preemption."""
    engine = windowed_engine(num_pages=30, num_blocks=160, max_num_seqs=4)
    requests = [make_request(range(i, i + 60), 80, user=f"user-{i}") for i in range(4)]
    transcript = run_all(engine, *requests)
    assert [transcript.of(request) for request in requests] == [expected(request) for request in requests]
    assert engine.scheduler.num_preemptions == 0


# --- prefix hits


def test_a_hit_needs_the_pages_of_the_last_window_and_no_others() -> None:
    prompt = list(range(40))
    for lost, num_cached in ((0, 36), (6, 36), (7, 28), (8, 32)):
        engine = windowed_engine()
        first, again = make_request(prompt, 2), make_request(prompt, 2)
        run_all(engine, first)
        drop_page(engine, first.block_keys[lost])
        transcript = run_all(engine, again)
        assert transcript.cached[again.request_id] == num_cached, f"without the page of block {lost}"
        assert transcript.of(again) == expected(again)


def test_a_hit_without_its_pages_would_be_seen() -> None:
    """The positive control of the test above: whoever takes the longer hit computes something else, and is stopped."""

    class Careless(WindowPages):
        def longest_hit(self, found):
            end = len(found)
            return end, end

    prompt, outcomes = list(range(40)), []
    for checks in (IsolationCheck.OFF, IsolationCheck.CHECK):
        engine = make_engine(runner=WindowedFakeRunner(WINDOW, 40), isolation_check=checks, check_conservation=False)
        engine.pool.pages.__class__ = Careless
        first, again = make_request(prompt, 2), make_request(prompt, 2)
        run_all(engine, first)
        transcript = run_all(engine, again)
        assert transcript.of(again) != expected(again)
        outcomes.append([violation.kind for violation in engine.violations])
    assert outcomes == [[], [ViolationKind.TABLE]]


def test_equal_content_written_again_gives_the_cached_block_its_page_back() -> None:
    engine = windowed_engine()
    prompt = list(range(40))
    first, again, third = (make_request(prompt, 2) for _ in range(3))
    run_all(engine, first)
    for key in first.block_keys[:9]:
        drop_page(engine, key)
    transcript = run_all(engine, again)
    assert transcript.cached[again.request_id] == 0
    transcript = run_all(engine, third)
    assert transcript.cached[third.request_id] == 36
    assert transcript.of(third) == expected(third)


def test_another_user_takes_nothing_of_it() -> None:
    engine = windowed_engine()
    prompt = list(range(40))
    mine, theirs, mine_again = make_request(prompt), make_request(prompt, user="bob"), make_request(prompt)
    run_all(engine, mine)
    assert run_all(engine, theirs).cached[theirs.request_id] == 0
    assert run_all(engine, mine_again).cached[mine_again.request_id] == 36


# --- what is overwritten


def test_a_purge_zeroes_pages_in_use_idle_and_long_given_back() -> None:
    def bytes_after(purged: str) -> int:
        engine = windowed_engine()
        engine.config = replace(engine.config, isolation_check=IsolationCheck.CHECK)  # poison would overwrite it, too
        run_all(engine, make_request(range(40), 30))
        engine.add_request(make_request(range(100, 160), 30))
        for _ in range(6):
            engine.step()
        engine.purge_user(user_hash("acme", purged))
        while engine.has_work:
            engine.step()
        return int((engine.runner.page_kv != 0).sum())

    assert bytes_after("alice") == 0
    assert bytes_after("bob") > 0


def test_a_damaged_page_ends_all_sharing() -> None:
    prompt = list(range(40))
    for is_damaged in (False, True):
        engine = windowed_engine(checksum_blocks=1.0)
        first, again = make_request(prompt, 2), make_request(prompt, 2)
        run_all(engine, first)
        block = engine.pool.cache.find(first.block_keys[8])
        if is_damaged:
            engine.runner.page_kv[engine.pool.pages.of_block[block.block_id], 1] ^= 1
        transcript = run_all(engine, again)
        assert transcript.of(again) == expected(again)
        assert transcript.cached[again.request_id] == (0 if is_damaged else 36)
        assert engine.is_healthy is not is_damaged


# --- faults


class PassesTooSoon(Publisher):
    """Lets go of blocks that the next token still sees."""

    def note_written(self, row):
        super().note_written(row)
        seq, window = row.seq, self._window
        for index in range(seq.window_start, min(seq.window_start + 2, seq.window_start + len(seq.window_pages))):
            window.pages.let_go(self._pool.blocks[seq.block_table[index]])
            del seq.window_pages[0]
            seq.window_start += 1


class FreedInUse(Scheduler):
    """The page of a block that the sequence goes on reading goes to somebody else."""

    def schedule(self):
        schedule = super().schedule()
        pages = self._pool.pages
        for row in schedule.rows:
            if len(row.seq.output_token_ids) == 3:
                number = row.seq.block_table[row.seq.window_start]
                page = pages.of_block[number]
                pages.of_block[number], pages.block_of[page] = NO_PAGE, None
        return schedule


class Reassigned(Scheduler):
    """As FreedInUse, and the same page comes back to the same block, whose bytes were others' meanwhile."""

    def schedule(self):
        schedule = super().schedule()
        for row in schedule.rows:
            if len(row.seq.output_token_ids) == 3:
                self._pool.pages.lives[row.seq.window_pages[0]] += 1
        return schedule


class ForeignPages(StepBuilder):
    def build(self, step_id, schedule):
        step = super().build(step_id, schedule)
        if len(step.rows) > 1:
            step.rows[1].window_pages = step.rows[0].window_pages
        return step


class TooFewPages(StepBuilder):
    def build_row(self, row):
        step_row = super().build_row(row)
        return replace(step_row, window_pages=list(step_row.window_pages)[:-1])


class ForgetsWrites(WindowPages):
    def note_written(self, block):
        pass


@pytest.mark.parametrize(
    ("part", "fault", "kind"),
    [
        ("publisher", PassesTooSoon, ViolationKind.TABLE),
        ("scheduler", FreedInUse, ViolationKind.REUSED),
        ("scheduler", Reassigned, ViolationKind.REUSED),
        ("step_builder", ForeignPages, ViolationKind.REUSED),
        ("step_builder", TooFewPages, ViolationKind.TABLE),
    ],
)
def test_a_planted_fault_is_named_before_it_runs(part: str, fault: type, kind: ViolationKind) -> None:
    engine = windowed_engine(parts=EngineParts(**{part: fault}), check_conservation=False)
    requests = [make_request(range(i * 50, i * 50 + 19 + i), 12, user=f"user-{i}") for i in range(2)]
    transcript = run_all(engine, *requests)
    assert kind in {violation.kind for violation in engine.violations}
    assert transcript.errors, "nobody was stopped"
    for request in requests:
        got = transcript.of(request)
        assert got == expected(request)[: len(got)], "a contaminated token got out"


def test_a_page_never_written_is_named() -> None:
    engine = windowed_engine(check_conservation=False)
    engine.pool.pages.__class__ = ForgetsWrites
    run_all(engine, make_request(range(19), 6))
    assert {violation.kind for violation in engine.violations} == {ViolationKind.UNWRITTEN}


def test_a_lost_page_breaks_the_conservation() -> None:
    engine = windowed_engine(check_conservation=False)
    run_all(engine, make_request(range(19), 6))
    engine.pool.pages._free.pop()
    run_all(engine, make_request(range(19), 6))
    assert {violation.kind for violation in engine.violations} == {ViolationKind.CONSERVATION}


# --- sizes


def test_pages_that_cannot_hold_one_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="12 window pages are too few: one sequence may need 14"):
        windowed_engine(num_pages=12)
    windowed_engine(num_pages=14)


@pytest.mark.parametrize(
    ("windows", "fraction", "pages"),
    [((None, None), 0.5, None), ((512, None), 1.0, None), ((512, None), 0.5, 501), ((512, 512), 0.05, 67)],
)
def test_the_plan(windows: tuple, fraction: float, pages: int | None) -> None:
    config = RunnerConfig(num_blocks=1000, window_fraction=fraction, max_num_batched_tokens=512)
    plan = plan_pool(config, windows, 1, None)
    assert (plan.num_blocks, plan.window and plan.window.num_pages) == (1000, pages)
    if plan.window is not None:
        assert (plan.window.num_tokens, plan.window.first_id) == (512, 1000)
        assert plan.num_bytes(windows, 1) < 2000
    with_budget = plan_pool(replace(config, num_blocks=None), windows, 7, 7 * 2000)
    assert 0.99 * 14000 < with_budget.num_bytes(windows, 7) <= 14000
    with pytest.raises(ValueError, match="kv_cache_bytes is 13, one block needs 14"):
        plan_pool(replace(config, num_blocks=None), windows, 7, 13)


def test_a_window_wider_than_the_pool_is_none() -> None:
    config = RunnerConfig(num_blocks=60, window_fraction=0.5, max_num_batched_tokens=512)
    assert plan_pool(config, (512, None), 1, None).window is None
    assert torch.Size((2, 60)).numel() == plan_pool(config, (512, None), 1, None).num_bytes((512, None), 1)


def test_first_seen_is_the_block_of_the_windows_first_token() -> None:
    pages = windowed_engine().pool.pages
    for position in range(60):
        assert pages.first_seen(position) == max(0, position - WINDOW + 1) // SIZE
    assert SlidingWindow(None, pages, SIZE)._most_seen == 4  # type: ignore[arg-type]
