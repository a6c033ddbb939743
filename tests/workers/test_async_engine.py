"""The engine on its own thread: nothing blocks it, nothing is lost, and a crash tells everyone but says nothing."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_builders import Transcript, make_engine, make_request, run_all
from fake_runner import FakeModelRunner, reference_tokens

from cache_service.events import BlockStored
from cluster.api.errors import InternalError, InvalidRequestError, UnavailableError
from cluster.api.output import FinishReason
from workers.async_engine import AsyncLLMEngine

PATIENCE_S = 120.0  # only a test that fails waits so long


class Consumer:
    """Collects outputs and lets a test wait for a condition."""

    def __init__(self) -> None:
        self.transcript = Transcript()
        self.num_calls = 0
        self._changed = threading.Condition()

    def __call__(self, outputs) -> None:
        with self._changed:
            self.num_calls += 1
            self.transcript.add(outputs)
            self._changed.notify_all()

    def wait_for(self, condition) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.transcript), timeout=PATIENCE_S), "nothing came"

    def wait_until_finished(self, *requests) -> None:
        self.wait_for(lambda transcript: {r.request_id for r in requests} <= set(transcript.finished))


class GatedRunner(FakeModelRunner):
    """Each step waits until the gate is open."""

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.gate = threading.Event()
        self.is_in_step = threading.Event()

    def execute(self, step):
        self.is_in_step.set()
        assert self.gate.wait(PATIENCE_S)
        return super().execute(step)


class CrashingRunner(GatedRunner):
    def execute(self, step):
        assert self.gate.wait(PATIENCE_S)
        if any(989 in row.token_ids for row in step.rows):
            raise RuntimeError("secret detail")
        return super().execute(step)


def until(condition) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, "it never came to that"
        time.sleep(0.001)


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


def started(consumer, on_events=None, **changes) -> AsyncLLMEngine:
    engine = AsyncLLMEngine(make_engine(**changes), consumer, on_events)
    engine.start()
    return engine


def test_requests_from_many_threads_all_get_their_own_answer(consumer) -> None:
    engine = started(consumer, num_blocks=200)
    requests = [make_request(range(i, i + 9 + i), 6, user=f"user-{i % 4}") for i in range(60)]
    threads = [
        threading.Thread(target=lambda part: [engine.submit(r) for r in part], args=(requests[k::4],)) for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.stop(PATIENCE_S)
    for request in requests:
        assert consumer.transcript.of(request) == reference_tokens(request)


def test_the_news_of_one_step_come_in_one_call(consumer) -> None:
    runner = GatedRunner()
    engine = started(consumer, runner=runner)
    requests = [make_request(range(i, i + 3), 5, user=f"user-{i}") for i in range(6)]
    for request in requests:
        engine.submit(request)
    runner.gate.set()
    engine.stop(PATIENCE_S)
    assert consumer.num_calls <= 7, "more calls than steps"
    assert len(consumer.transcript.finished) == 6


def test_submitting_and_aborting_do_not_wait_for_a_step(consumer) -> None:
    runner = GatedRunner()
    engine = started(consumer, runner=runner)
    victim, other = make_request(range(9), 8), make_request(range(50, 60), 4, user="bob")
    engine.submit(victim)
    assert runner.is_in_step.wait(PATIENCE_S)
    engine.submit(other)
    engine.abort(victim.request_id)
    future = engine.call(lambda inner: inner.load())
    assert runner.steps == [], "the step that is held has ended, so somebody waited for it"
    assert not future.done(), "a call may not run during a step"
    runner.gate.set()
    consumer.wait_until_finished(victim, other)
    assert consumer.transcript.reasons[victim.request_id][0] is FinishReason.ABORT
    assert consumer.transcript.of(other) == reference_tokens(other)
    assert future.result(PATIENCE_S).num_running <= 2
    engine.stop(PATIENCE_S)


def test_a_refusal_is_an_output(consumer) -> None:
    engine = started(consumer)
    bad = make_request([], 3)
    engine.submit(bad)
    consumer.wait_until_finished(bad)
    assert isinstance(consumer.transcript.errors[bad.request_id], InvalidRequestError)
    engine.stop(PATIENCE_S)


def test_a_failing_call_fails_its_future_and_nothing_else(consumer) -> None:
    engine = started(consumer)
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda inner: 1 / 0).result(PATIENCE_S)
    request = make_request(range(5), 3)
    engine.submit(request)
    consumer.wait_until_finished(request)
    assert not engine.is_dead
    engine.stop(PATIENCE_S)


def test_a_crash_fails_every_request_without_details(consumer) -> None:
    runner = CrashingRunner()
    runner.gate.set()
    engine = started(consumer, runner=runner)
    early = make_request(range(5), 2)
    engine.submit(early)
    consumer.wait_until_finished(early)
    fine, poisonous = make_request(range(9), 100), make_request([989, 1], 4, user="bob")
    runner.gate.clear()  # so that neither can end before both are there
    engine.submit(fine)
    engine.submit(poisonous)
    runner.gate.set()
    consumer.wait_until_finished(fine, poisonous)
    for request in (fine, poisonous):
        error = consumer.transcript.errors[request.request_id]
        assert isinstance(error, InternalError)
        assert "secret" not in str(error)
    assert early.request_id not in consumer.transcript.errors
    assert engine.is_dead
    with pytest.raises(InternalError):
        engine.submit(make_request(range(3)))
    with pytest.raises(InternalError):
        engine.call(lambda inner: inner.load())
    engine.abort(fine.request_id)


def test_stopping_finishes_what_runs_and_takes_nothing_new(consumer) -> None:
    runner = GatedRunner()
    engine = started(consumer, runner=runner)
    request = make_request(range(9), 8)
    engine.submit(request)
    assert runner.is_in_step.wait(PATIENCE_S)
    stopper = threading.Thread(target=engine.stop, args=(PATIENCE_S,))
    stopper.start()
    until(lambda: engine._is_draining)
    with pytest.raises(UnavailableError):
        engine.submit(make_request(range(3)))
    runner.gate.set()
    stopper.join(PATIENCE_S)
    assert consumer.transcript.of(request) == reference_tokens(request)
    with pytest.raises(UnavailableError):
        engine.submit(make_request(range(3)))


def test_stopping_aborts_what_takes_too_long(consumer) -> None:
    runner = GatedRunner()
    engine = started(consumer, runner=runner)
    request = make_request(range(9), 100)
    engine.submit(request)
    assert runner.is_in_step.wait(PATIENCE_S)
    with ThreadPoolExecutor() as pool:
        in_time = pool.submit(engine.stop, 0.01)
        until(lambda: engine._commands.qsize() == 2)  # it wakes the engine, and tells it to abort when time is over
        runner.gate.set()
        assert not in_time.result(PATIENCE_S)
    assert consumer.transcript.reasons[request.request_id][0] is FinishReason.ABORT


def test_block_events_come_in_order_and_a_slow_consumer_gets_batches(consumer) -> None:
    batches: list[list] = []
    door = threading.Event()

    def take(batch) -> None:
        assert door.wait(PATIENCE_S)
        batches.append(batch)

    inner = make_engine(num_blocks=200)
    engine = AsyncLLMEngine(inner, consumer, take)
    engine.start()
    requests = [make_request(range(i, i + 30), 6, user=f"user-{i}") for i in range(12)]
    for request in requests:
        engine.submit(request)
    consumer.wait_until_finished(*requests)
    door.set()
    assert engine.stop(PATIENCE_S)
    keys = [key for batch in batches for event in batch if isinstance(event, BlockStored) for key in event.keys]
    assert tuple(keys) == inner.cached_keys()
    assert len(batches) <= 3 < inner.meter.num_steps, "what was held, what gathered behind it, and the last step's"


def test_a_failing_event_consumer_does_not_stop_the_engine(consumer, caplog) -> None:
    def fail(batch) -> None:
        raise ConnectionError("no index")

    engine = started(consumer, fail)
    request = make_request(range(20), 6)
    engine.submit(request)
    assert engine.stop(PATIENCE_S)
    assert consumer.transcript.of(request) == reference_tokens(request)
    assert "block events could not be delivered" in caplog.text


def test_the_thread_gives_the_same_tokens_as_the_plain_engine(consumer) -> None:
    requests = [make_request(range(i, i + 12), 6, temperature=1.0, seed=i) for i in range(5)]
    plain = run_all(make_engine(), *requests)
    engine = started(consumer)
    for request in requests:
        engine.submit(request)
    engine.stop(PATIENCE_S)
    assert [consumer.transcript.of(r) for r in requests] == [plain.of(r) for r in requests]


def test_what_was_waiting_when_the_engine_crashed_is_told_so(consumer) -> None:
    class GatedCrash(GatedRunner):
        def execute(self, step):
            super().execute(step)
            raise RuntimeError("broken")

    runner = GatedCrash()
    engine = started(consumer, runner=runner)
    running, waiting = make_request(range(5)), make_request(range(6))
    engine.submit(running)
    assert runner.is_in_step.wait(PATIENCE_S)
    engine.submit(waiting)
    future = engine.call(lambda inner: inner.load())
    runner.gate.set()
    consumer.wait_until_finished(running, waiting)
    assert {type(error) for error in consumer.transcript.errors.values()} == {InternalError}
    with pytest.raises(InternalError):
        future.result(PATIENCE_S)
