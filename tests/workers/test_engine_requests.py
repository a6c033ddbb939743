"""What a request may ask for, how it ends, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_builders import (
    KEYER,
    Transcript,
    make_config,
    make_engine,
    make_request,
    private_fields,
    run_all,
    tenant_hash,
)
from fake_runner import SECRET, FakeModelRunner, fake_identity, reference_tokens

from cache_service.block_key import BlockKeyer
from cluster.api.errors import (
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from cluster.api.output import FinishReason
from cluster.api.scope import Scope, ScopeFields, ScopeSpan
from workers.build import EngineParts, build_engine
from workers.config import Batching

PROMPT = range(10)


def outputs_of(engine, request) -> tuple[list[int], FinishReason]:
    transcript = run_all(engine, request)
    return transcript.of(request), transcript.reasons[request.request_id][0]


FREE = reference_tokens(make_request(PROMPT, 12))
"""What the fake says after PROMPT when nothing stops it."""


def test_max_tokens_ends_with_length() -> None:
    assert outputs_of(make_engine(), make_request(PROMPT, 12)) == (FREE, FinishReason.LENGTH)


def test_an_end_of_sequence_token_stops_and_is_the_last() -> None:
    engine = make_engine(runner=FakeModelRunner(eos_token_ids=frozenset({FREE[4]})))
    assert outputs_of(engine, make_request(PROMPT, 12)) == (FREE[:5], FinishReason.STOP)
    assert outputs_of(engine, make_request(PROMPT, 12, ignore_eos=True)) == (FREE, FinishReason.LENGTH)
    assert outputs_of(engine, make_request(PROMPT, 5)) == (FREE[:5], FinishReason.STOP)


def test_a_stop_token_stops_and_is_named() -> None:
    engine = make_engine()
    engine.add_request(make_request(PROMPT, 12, stop_token_ids=(FREE[2],), ignore_eos=True))
    deltas = [delta for _ in range(5) for output in engine.step() for delta in output.deltas]
    assert [delta.token_ids[0] for delta in deltas] == FREE[:3]
    assert [delta.stop_token_id for delta in deltas] == [None, None, FREE[2]]


def test_before_min_tokens_nothing_stops() -> None:
    request = make_request(PROMPT, 12, stop_token_ids=(FREE[2],), min_tokens=3)
    assert outputs_of(make_engine(), request) == (FREE[:3], FinishReason.STOP)
    request = make_request(PROMPT, 12, stop_token_ids=(FREE[2],), min_tokens=4)
    assert outputs_of(make_engine(), request) == (FREE, FinishReason.LENGTH)


def test_logprobs_are_aligned_and_only_for_who_asked() -> None:
    engine = make_engine()
    with_logprobs, without = make_request(PROMPT, 3, logprobs=2), make_request(PROMPT, 3)
    engine.add_request(with_logprobs)
    engine.add_request(without)
    for _ in range(4):
        for output in engine.step():
            for delta in output.deltas:
                if output.request_id == without.request_id:
                    assert delta.logprobs is None
                else:
                    assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
                    assert len(delta.logprobs[0].top) == 2


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8, 30])
@pytest.mark.parametrize("n", [2, 5, 9])
def test_choices_share_the_prompt_and_nothing_else(num_prompt: int, n: int) -> None:
    """Copy on write, also of a partly filled block; nine choices do not fit into one batch of eight."""
    engine = make_engine()
    request = make_request(range(num_prompt), 9, n=n, temperature=1.0)
    transcript = run_all(engine, request)
    for choice in range(n):
        assert transcript.of(request, choice) == reference_tokens(request, choice)
    assert engine.violations == []
    assert transcript.cached == {request.request_id: 0}


def test_choices_compute_the_prompt_once() -> None:
    engine = make_engine()
    engine.add_request(make_request(range(30), 2, n=4, temperature=1.0))
    num_tokens = 0
    while engine.has_work:
        engine.step()
        num_tokens += engine.runner.steps[-1].num_tokens
    assert num_tokens == 30 + 4


def test_a_resumed_request_goes_on_where_it_was() -> None:
    full = reference_tokens(make_request(PROMPT, 12, temperature=1.0))
    for num_emitted in (1, 3, 6, 11):
        request = make_request(PROMPT, 12, temperature=1.0, emitted=(tuple(full[:num_emitted]),))
        assert outputs_of(make_engine(), request) == (full[num_emitted:], FinishReason.LENGTH)


def test_a_resumed_choice_that_had_ended_says_so_without_a_token() -> None:
    full = [reference_tokens(make_request(PROMPT, 6, n=2, temperature=1.0), choice) for choice in range(2)]
    request = make_request(PROMPT, 6, n=2, temperature=1.0, emitted=(tuple(full[0]), tuple(full[1][:2])))
    transcript = run_all(make_engine(), request)
    assert transcript.of(request, 0) == []
    assert transcript.of(request, 1) == full[1][2:]
    assert transcript.reasons[request.request_id] == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}


def test_a_request_resumed_after_its_end_finishes_at_once() -> None:
    engine = make_engine()
    engine.add_request(make_request(PROMPT, 12, emitted=(tuple(FREE),)))
    assert engine.has_work
    (output,) = engine.step()
    assert output.finished
    assert not engine.has_work


def test_a_passed_deadline_ends_the_request_and_frees_its_blocks() -> None:
    now = 100.0
    engine = make_engine(parts=EngineParts(clock=lambda: now))
    late, other = make_request(PROMPT, 50, deadline_unix_s=105.0), make_request(PROMPT, 8, user="bob")
    engine.add_request(late)
    engine.add_request(other)
    transcript = Transcript()
    for _ in range(3):
        transcript.add(engine.step())
    assert transcript.errors == {}
    now = 105.0
    run_all(engine, transcript=transcript)
    assert isinstance(transcript.errors[late.request_id], DeadlineExceededError)
    assert transcript.of(other) == reference_tokens(other)
    assert engine.pool.num_in_use == 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_abort_at_any_time_gives_everything_back(num_steps: int) -> None:
    engine = make_engine()
    victim = make_request(range(20), 12, n=3, temperature=1.0)
    engine.add_request(victim)
    transcript = Transcript()
    for _ in range(num_steps):
        transcript.add(engine.step())
    engine.abort(victim.request_id)
    engine.abort(victim.request_id)
    engine.abort("unknown")
    run_all(engine, transcript=transcript)
    assert transcript.reasons[victim.request_id] == dict.fromkeys(range(3), FinishReason.ABORT)
    assert engine.pool.num_in_use == 0
    assert engine.load().request_ids == ()


def own_spans(**changes) -> tuple[ScopeSpan, ...]:
    return (ScopeSpan(None, replace(private_fields("acme", "alice"), **changes)),)


WIDE = ScopeSpan(1, ScopeFields(Scope.TEMPLATE, tenant_hash("acme"), template=b"t"))
OPEN = own_spans()[0]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt_token_ids": (), "block_keys": ()}, InvalidRequestError),
        ({"prompt_token_ids": (*range(9), 997)}, InvalidRequestError),
        ({"prompt_token_ids": (*range(9), -1)}, InvalidRequestError),
        ({"block_keys": ()}, InvalidRequestError),
        ({"spans": ()}, InvalidRequestError),
        ({"spans": (OPEN, OPEN)}, InvalidRequestError),
        ({"spans": (WIDE,)}, InvalidRequestError),
        ({"spans": (replace(OPEN, num_blocks=1), WIDE, OPEN)}, InvalidRequestError),
        ({"spans": own_spans(user=b"bob")}, InvalidRequestError),
        ({"spans": own_spans(tenant=b"globex")}, InvalidRequestError),
        ({"spans": own_spans(user=None)}, InvalidRequestError),
        ({"spans": own_spans(tenant=None)}, InvalidRequestError),
        ({"emitted": ((1,), (2,))}, InvalidRequestError),
        ({"adapter": "unknown"}, NotFoundError),
    ],
)
def test_what_cannot_be_served_is_refused_on_arrival(change: dict, error: type[Exception]) -> None:
    engine = make_engine()
    with pytest.raises(error):
        engine.add_request(replace(make_request(PROMPT), **change))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("sampling", "error"),
    [
        ({"max_tokens": 0}, InvalidRequestError),
        ({"n": 0}, InvalidRequestError),
        ({"max_tokens": 500}, ContextLengthError),
    ],
)
def test_impossible_sampling_is_refused(sampling: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        make_engine().add_request(make_request(PROMPT, **sampling))


def test_the_context_limit_is_inclusive_and_named() -> None:
    engine = make_engine(max_model_len=16)
    assert len(outputs_of(engine, make_request(PROMPT, 6))[0]) == 6
    with pytest.raises(ContextLengthError, match=r"17 tokens, the limit is 16"):
        engine.add_request(make_request(PROMPT, 7))


def test_what_could_never_fit_into_the_pool_is_refused_and_what_just_fits_is_served() -> None:
    engine = make_engine(num_blocks=8)  # two of them may be pinned
    with pytest.raises(ContextLengthError, match=r"25 tokens, the KV pool holds 24"):
        engine.add_request(make_request(PROMPT, 15))
    assert len(outputs_of(engine, make_request(PROMPT, 14))[0]) == 14


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = make_engine(max_queue_len=2)
    for _ in range(2):
        engine.add_request(make_request(PROMPT))
    with pytest.raises(OverloadedError) as caught:
        engine.add_request(make_request(PROMPT))
    assert caught.value.retry_after_s > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0), ("block_size", 0), ("max_num_seqs", 0), ("max_num_batched_tokens", 7), ("max_model_len", 1),
        ("max_queue_len", 0), ("event_log_size", 0), ("max_pinned_fraction", 1.0),
        ("user_idle_timeout_s", 0.0), ("session_idle_timeout_s", -1.0),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_with_its_value(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {value}"):
        make_config(**{field: value})


@pytest.mark.parametrize(
    ("change", "runner"),
    [
        ({"num_blocks": 65}, FakeModelRunner(num_blocks=64)),
        ({"max_model_len": 600}, FakeModelRunner()),
        ({"block_size": 8}, FakeModelRunner()),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict, runner: FakeModelRunner) -> None:
    with pytest.raises(ValueError, match=r"differ|has|limit"):
        build_engine(make_config(**change), runner, KEYER)


def test_a_keyer_for_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="another model"):
        build_engine(make_config(), FakeModelRunner(), BlockKeyer(SECRET, fake_identity(4, model="other")))


def test_decodes_come_first_and_chunks_are_small_while_others_are_alive() -> None:
    engine = make_engine(max_num_batched_tokens=32, max_shared_chunk_tokens=12)
    engine.add_request(make_request(range(40), 8))
    engine.step()
    assert [len(row.token_ids) for row in engine.runner.steps[-1].rows] == [32], "alone, the budget is the only limit"
    engine.step()
    engine.add_request(make_request(range(100, 130), 8, user="bob"))
    engine.add_request(make_request(range(200, 230), 8, user="carol"))
    engine.step()
    assert [len(row.token_ids) for row in engine.runner.steps[-1].rows] == [1, 12, 12]


def test_nobody_overtakes_because_of_a_better_hit() -> None:
    engine = make_engine(max_num_seqs=1)
    run_all(engine, make_request(range(20), 1))
    cold, hot = make_request(range(300, 320), 2, user="bob"), make_request(range(20), 2)
    assert run_all(engine, cold, hot).finished == [cold.request_id, hot.request_id]


def test_the_load_counts_what_is_there() -> None:
    engine = make_engine(max_num_seqs=2)
    requests = [make_request(range(20 + i), 8) for i in range(3)]
    for request in requests:
        engine.add_request(request)
    assert engine.load().pending_prefill_tokens == 20 + 21 + 22
    for _ in range(4):
        engine.step()
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.pending_prefill_tokens) == (2, 1, 22)
    assert load.num_free_blocks == 64 - engine.pool.num_in_use
    assert set(load.request_ids) == {request.request_id for request in requests}
    assert load.is_healthy
    assert load.prefill_tokens_per_s > 0
    assert load.decode_step_s > 0


def test_a_static_batch_lets_nobody_in_before_all_are_done() -> None:
    engine = make_engine(batching=Batching.STATIC, max_num_seqs=2)
    requests = [make_request(range(i * 50, i * 50 + 5), 3 + 4 * (i == 0), user=f"user-{i}") for i in range(3)]
    for request in requests:
        engine.add_request(request)
    batches = []
    while engine.has_work:
        outputs = engine.step()
        batches.append({output.request_id for output in outputs})
    first_of_third = next(i for i, batch in enumerate(batches) if requests[2].request_id in batch)
    assert first_of_third > max(i for i, batch in enumerate(batches) if requests[0].request_id in batch)
    assert not any({requests[2].request_id, requests[0].request_id} <= batch for batch in batches)


def test_a_request_that_fails_has_no_other_news_in_that_step() -> None:
    engine = make_engine(parts=EngineParts(clock=lambda: 100.0))
    ended = tuple(reference_tokens(make_request(PROMPT, 3, n=2, temperature=1.0)))
    request = make_request(PROMPT, 3, n=2, temperature=1.0, emitted=(ended, ended[:1]), deadline_unix_s=99.0)
    engine.add_request(request)
    (output,) = engine.step()
    assert isinstance(output.error, DeadlineExceededError)
    assert output.deltas == ()


def test_the_deadline_of_an_aborted_request_does_not_hit_the_next_one_with_its_id() -> None:
    now = 100.0
    engine = make_engine(parts=EngineParts(clock=lambda: now))
    engine.add_request(make_request(PROMPT, request_id="same", deadline_unix_s=101.0))
    engine.abort("same")
    engine.step()
    second = make_request(PROMPT, request_id="same")
    engine.add_request(second)
    now = 102.0
    transcript = run_all(engine)
    assert transcript.errors == {}
    assert transcript.of(second) == reference_tokens(second)
