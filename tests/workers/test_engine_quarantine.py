"""A quarantined engine shares nothing, keeps nothing running, and leaves its evidence behind."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from engine_builders import BLOCK_SIZE, KEYER, Transcript, make_engine, make_request, run_all

from cluster.api.errors import InternalError, PermissionDeniedError, UnavailableError
from cluster.experiment.event_file import read_events
from cluster.experiment.trace import trace_request
from workers.async_engine import AsyncLLMEngine
from workers.counters import engine_counters
from workers.evidence import inspect, quarantine_reason, trace, write_event_log
from workers.planted import PlantedFault, planted_parts

PROMPT = range(3 * BLOCK_SIZE + 1)


def test_what_has_output_fails_for_good_and_what_has_none_may_go_elsewhere() -> None:
    engine = make_engine(max_num_seqs=1)
    running, waiting = make_request(PROMPT, 20), make_request(PROMPT, 20)
    transcript = Transcript()
    engine.add_request(running)
    engine.add_request(waiting)
    for _ in range(3):
        transcript.add(engine.step())
    assert engine.quarantine("a test")
    transcript.add(engine.step())
    assert isinstance(transcript.errors[running.request_id], InternalError)
    assert isinstance(transcript.errors[waiting.request_id], UnavailableError)
    assert not engine.has_work
    assert engine.pool.num_in_use == 0


def test_a_resumed_request_without_a_token_of_this_engine_may_go_elsewhere() -> None:
    engine = make_engine()
    resumed = make_request(PROMPT, 20, emitted=((1, 2, 3),))
    engine.add_request(resumed)
    engine.quarantine("a test")
    transcript = Transcript()
    transcript.add(engine.step())
    assert isinstance(transcript.errors[resumed.request_id], UnavailableError)


def test_nothing_is_shared_afterwards_and_the_first_reason_stands() -> None:
    engine = make_engine()
    run_all(engine, make_request(PROMPT))
    assert run_all(engine, hit := make_request(PROMPT)).cached[hit.request_id] > 0
    assert engine.is_healthy
    assert engine.quarantine("first")
    assert not engine.quarantine("second")
    assert quarantine_reason(engine) == "first"
    assert not engine.is_healthy
    assert dict(engine_counters(engine))["quarantined"] == 1
    miss = make_request(PROMPT)
    assert run_all(engine, miss).cached[miss.request_id] == 0


def test_a_served_engine_takes_no_new_work() -> None:
    engine = make_engine()
    outputs = []
    served = AsyncLLMEngine(engine, outputs.extend)
    served.start()
    served.call(lambda each: each.quarantine("a test")).result(120)
    served.submit(make_request(PROMPT))
    served.call(lambda each: None).result(120)
    served.stop(120)
    (output,) = outputs
    assert isinstance(output.error, UnavailableError)


def test_the_batch_limit_moves_between_one_and_what_was_tested() -> None:
    engine = make_engine(max_num_seqs=4)
    engine.set_max_num_seqs(2)
    for _ in range(4):
        engine.add_request(make_request(PROMPT, 12))
    engine.step()
    assert len(engine.scheduler.running) == 2
    engine.set_max_num_seqs(4)
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.running) == 4
    engine.set_max_num_seqs(1)
    assert len(engine.scheduler.running) == 4, "what runs already goes on"
    while engine.has_work:
        engine.step()
    for size in (0, 5):
        with pytest.raises(ValueError, match="must be from 1 to 4"):
            engine.set_max_num_seqs(size)


def test_choices_of_one_request_still_fit_when_the_limit_has_shrunk() -> None:
    engine = make_engine(max_num_seqs=4)
    request = make_request(PROMPT, 5, n=4)
    engine.add_request(request)
    engine.set_max_num_seqs(2)
    transcript = Transcript()
    while engine.has_work:
        transcript.add(engine.step())
    assert [len(transcript.of(request, choice)) for choice in range(4)] == [5] * 4


def test_books_settings_and_keys_can_be_inspected() -> None:
    engine = make_engine()
    run_all(engine, make_request(PROMPT))
    books = inspect(engine, KEYER)
    assert books.num_free + books.num_cached + books.num_in_use == books.num_blocks
    assert books.num_published == 4
    assert books.broken_law is None
    assert dict(books.settings)["max_num_seqs"] == "8"
    engine.pool._free.append(engine.pool._free[0])
    assert inspect(engine, KEYER).broken_law == "a block is twice in the free list"


def test_a_trace_holds_every_life_of_the_blocks_a_request_touched_and_nothing_else() -> None:
    engine = make_engine()
    first, second, other = make_request(PROMPT), make_request(PROMPT), make_request(range(100, 113), user="bob")
    for request in (first, second, other):
        run_all(engine, request)
    events = trace(engine.event_log, {second.request_id})
    blocks = {event.block for event in events if event.request == second.request_id}
    assert {event.block for event in events} == blocks
    reused = [event for event in events if event.action == "reuse"]
    assert {event.request for event in reused} == {second.request_id}
    assert any(event.request == first.request_id and event.action == "publish" for event in events)


def test_the_kept_log_can_be_traced_and_names_nobody(tmp_path: Path) -> None:
    engine = make_engine()
    first, second = make_request(PROMPT), make_request(PROMPT)
    run_all(engine, first)
    run_all(engine, second)
    path = tmp_path / "quarantine" / "worker.jsonl"
    write_event_log(path, list(engine.event_log), "a test", {second.request_id: 7})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = read_events(path)
    found = trace_request(content, second.request_id)
    assert [touched.origin for touched in found.blocks][:3] == [first.request_id] * 3
    assert found.foreign is not None
    assert found.foreign.step == 7
    header = json.loads(path.read_text().splitlines()[0])
    assert header["reason"] == "a test"
    assert header["users"][first.request_id] == header["users"][second.request_id]
    assert "alice" not in path.read_text()


def test_a_fault_is_planted_only_behind_the_gate_and_only_in_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PlantedFault("cluster.experiment.faults.live:engine_parts", "mask_of_wrong_row", rank=1)
    monkeypatch.delenv("WATCHWORD_ALLOW_PLANTED_FAULTS", raising=False)
    with pytest.raises(PermissionDeniedError, match="WATCHWORD_ALLOW_PLANTED_FAULTS=1"):
        planted_parts(planted, rank=1)
    assert planted_parts(None, rank=1) is None
    monkeypatch.setenv("WATCHWORD_ALLOW_PLANTED_FAULTS", "1")
    assert planted_parts(planted, rank=0) is None
    parts = planted_parts(planted, rank=1)
    assert parts is not None
    assert parts.wrap_model is not None
