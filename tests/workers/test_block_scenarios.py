"""Kinds of fault that serving engines really had: block lifetime, preemption, ids, parameters of the wrong row."""

from __future__ import annotations

import pytest
from engine_builders import KEYER, Transcript, make_engine, make_request, run_all
from fake_runner import SECRET, ConstantKeyer, FakeModelRunner, fake_identity, reference_tokens

from cluster.api.errors import InvalidRequestError
from cluster.api.output import FinishReason
from workers.config import Batching, IsolationCheck
from workers.event_log import BlockAction

B = 4  # block size
BOUNDARY_LENGTHS = [k * B + d for k in (1, 2, 3) for d in (-1, 0, 1)]


def warm(engine, *requests) -> None:
    run_all(engine, *requests)
    assert engine.pool.cache.counters.hits == 0


def test_a_hit_block_cannot_be_taken_by_another_request_of_the_same_step() -> None:
    """A nearly full pool: one request hits idle cached blocks, another one of the same step needs new ones."""
    engine = make_engine(num_blocks=12, max_pinned_fraction=0.0)
    warm(engine, make_request(range(17), 1))  # 4 blocks cached, 8 free
    first = make_request([*range(16), 500, 501], 4)
    second = make_request(range(600, 626), 2, user="bob")
    transcript = run_all(engine, first, second)
    assert transcript.cached[first.request_id] == 16
    assert transcript.of(first) == reference_tokens(first)
    assert transcript.of(second) == reference_tokens(second)
    assert engine.violations == []


def test_equal_prefixes_of_one_step_do_not_read_each_other_before_the_write() -> None:
    """Sixteen at once, cold: a block can be found only after the step that wrote it."""
    engine = make_engine(
        num_blocks=200,
        max_num_seqs=16,
        max_num_batched_tokens=400,
        max_shared_chunk_tokens=100,
        max_shared_prefill_tokens=400,
    )
    requests = [make_request([*range(20), 900 + i], 4) for i in range(16)]
    transcript = run_all(engine, *requests)
    for request in requests:
        assert transcript.cached[request.request_id] == 0
        assert transcript.of(request) == reference_tokens(request)
    written = {}
    for record in engine.event_log:
        life = (record.block_id, record.generation)
        if record.action is BlockAction.WRITE:
            written.setdefault(life, record.step_id)
        if record.action is BlockAction.PUBLISH:
            assert written[life] <= record.step_id
    later = make_request([*range(20), 7], 4)
    assert run_all(engine, later).cached[later.request_id] == 20


def test_equal_blocks_are_kept_once() -> None:
    """Duplicates computed side by side end up as one block, and their continuations can still be found."""
    engine = make_engine(num_blocks=100)
    twins = [make_request(range(24), 12) for _ in range(2)]
    transcript = run_all(engine, *twins)
    output = transcript.of(twins[1])
    num_full = (24 + 12 - 1) // B
    assert engine.pool.num_cached == num_full
    follow_up = make_request([*range(24), *output, 5], 2)
    assert run_all(engine, follow_up).cached[follow_up.request_id] == num_full * B
    assert engine.pool.cache.counters.verify_failures == 0


def test_an_evicted_block_cannot_be_found_under_its_old_key() -> None:
    engine = make_engine(num_blocks=8, max_pinned_fraction=0.0)
    old = make_request(range(9), 1)
    warm(engine, old)
    key = old.block_keys[0]
    life = engine.pool.cache.find(key).identity
    run_all(engine, make_request(range(100, 130), 2, user="bob"))
    assert engine.pool.cache.find(key) is None
    assert engine.pool.blocks[life.block_id].generation > life.generation
    actions = [record.action for record in engine.event_log.of_block(life.block_id)]
    assert actions.index(BlockAction.EVICT) > actions.index(BlockAction.PUBLISH)
    again = make_request(range(9), 1)
    transcript = run_all(engine, again)
    assert transcript.cached[again.request_id] == 0
    assert transcript.of(again) == reference_tokens(again)


@pytest.mark.parametrize("offset", range(B))
def test_a_finish_at_any_offset_of_a_page_frees_each_block_once(offset: int) -> None:
    engine = make_engine(prefix_caching=False)
    transcript = run_all(engine, make_request(range(10 + offset), 5), make_request(range(11), 3 + offset, user="bob"))
    assert len(transcript.finished) == 2
    assert engine.pool.num_free == engine.config.num_blocks


@pytest.mark.parametrize("length", BOUNDARY_LENGTHS)
@pytest.mark.parametrize("is_same_end", [True, False])
def test_hits_at_block_boundaries_ten_at_a_time(length: int, is_same_end: bool) -> None:
    """Cached prefix lengths kB-1, kB, kB+1, exactly as long as the prompt or followed by something else."""
    engine = make_engine(num_blocks=120, max_num_seqs=10, max_num_batched_tokens=64)
    prefix = list(range(200, 200 + length))
    warm(engine, make_request(prefix, 1))
    requests = [make_request(prefix if is_same_end else [*prefix, 50 + i], 6) for i in range(10)]
    transcript = run_all(engine, *requests)
    num_prompt = length if is_same_end else length + 1
    num_hit = min(length // B, (num_prompt - 1) // B)  # the last token is computed always
    for request in requests:
        assert transcript.cached[request.request_id] == num_hit * B
        assert transcript.of(request) == reference_tokens(request)


@pytest.mark.parametrize("at_output", [1, 17, B - 1, B, B + 1])
@pytest.mark.parametrize("num_times", [1, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_changes_nothing(at_output: int, num_times: int, prefix_caching: bool) -> None:
    engine = make_engine(prefix_caching=prefix_caching)
    request = make_request(range(13), 24)
    engine.add_request(request)
    seq = engine._live[request.request_id].sequences[0]
    transcript = Transcript()
    while engine.has_work:
        transcript.add(engine.step())
        if len(seq.output_token_ids) >= at_output and seq.num_preemptions < num_times and engine.has_work:
            engine.scheduler.preempt(seq)
    assert seq.num_preemptions == num_times
    assert transcript.of(request) == reference_tokens(request)
    assert transcript.reasons[request.request_id][0] is FinishReason.LENGTH
    assert engine.violations == []


def test_preemption_under_pressure_keeps_length_and_order() -> None:
    engine = make_engine(num_blocks=16, max_pinned_fraction=0.0, isolation_check=IsolationCheck.POISON)
    requests = [make_request(range(i * 20, i * 20 + 9), 40, user=f"user-{i}") for i in range(5)]
    transcript = run_all(engine, *requests)
    assert engine.scheduler.num_preemptions > 0
    for request in requests:
        assert transcript.of(request) == reference_tokens(request)
    assert transcript.finished == [request.request_id for request in requests], "earlier arrivals may not be overtaken"


def test_each_request_has_its_own_parameters() -> None:
    engine = make_engine()
    requests = [
        make_request(range(5), 3),
        make_request(range(5), 7, temperature=1.0, seed=5),
        make_request(range(5), 11, temperature=1.0, seed=6, logprobs=2),
    ]
    transcript = run_all(engine, *requests)
    assert [len(transcript.of(request)) for request in requests] == [3, 7, 11]
    for request in requests:
        assert transcript.of(request) == reference_tokens(request)
    assert transcript.of(requests[1]) != transcript.of(requests[2])[:7]


def test_a_live_id_is_refused_and_harms_nobody() -> None:
    engine = make_engine()
    first = make_request(range(9), 6, request_id="twice")
    engine.add_request(first)
    transcript = Transcript()
    transcript.add(engine.step())
    with pytest.raises(InvalidRequestError):
        engine.add_request(make_request(range(50, 60), 6, user="bob", request_id="twice"))
    assert run_all(engine, transcript=transcript).of(first) == reference_tokens(first)


def test_an_id_may_come_back_after_an_abort() -> None:
    engine = make_engine()
    engine.add_request(make_request(range(9), 6, request_id="again"))
    engine.step()
    engine.abort("again")
    second = make_request(range(50, 60), 6, user="bob", request_id="again")
    engine.add_request(second)
    outputs = [output for _ in range(12) for output in engine.step()]
    aborted, *rest = outputs
    assert aborted.finished
    assert aborted.deltas[0].finish_reason is FinishReason.ABORT
    assert aborted.deltas[0].token_ids == ()
    transcript = Transcript()
    transcript.add(rest)
    assert transcript.of(second) == reference_tokens(second)
    assert transcript.reasons["again"][0] is FinishReason.LENGTH


def test_the_order_of_physical_blocks_does_not_matter() -> None:
    requests = [make_request(range(i, i + 30), 8, user=f"user-{i}") for i in range(4)]
    outputs = []
    for reverse in (False, True):
        engine = make_engine()
        if reverse:
            engine.pool._free.reverse()
        transcript = run_all(engine, *requests)
        outputs.append([transcript.of(request) for request in requests])
    assert outputs[0] == outputs[1] == [reference_tokens(request) for request in requests]


def constant_keyer() -> ConstantKeyer:
    return ConstantKeyer(SECRET, fake_identity(B))


def test_a_constant_hash_changes_no_output_and_lets_nobody_in() -> None:
    """Every key collides: reuse drops, verify_failures counts, and all tokens stay right."""
    keyer = constant_keyer()
    engine = make_engine(keyer=keyer)
    prompts = [[*range(12), 300 + i] for i in range(6)] + [[*range(100, 130)], [*range(12)]]
    for user in ("alice", "bob"):
        requests = [make_request(prompt, 6, user=user, keyer=keyer) for prompt in prompts]
        transcript = run_all(engine, *requests)
        for request in requests:
            assert transcript.of(request) == reference_tokens(request)
        if user == "bob":
            assert set(transcript.cached.values()) == {0}
    counters = engine.pool.cache.counters
    assert counters.verify_failures > 0
    assert counters.publish_conflicts > 0
    assert len(engine.pool.cache) == 1
    assert engine.violations == []


def test_a_constant_hash_still_serves_the_one_block_it_can_name() -> None:
    """The pair of the test above: the check refuses what differs, not everything."""
    keyer = constant_keyer()
    engine = make_engine(keyer=keyer)
    run_all(engine, make_request(range(6), 1, keyer=keyer))
    again = make_request(range(6), 3, keyer=keyer)
    transcript = run_all(engine, again)
    assert transcript.cached[again.request_id] == B
    assert transcript.of(again) == reference_tokens(again)


@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize("chunk", [1, 3, B, 100])
def test_chunking_and_batching_change_nothing(batching: Batching, chunk: int) -> None:
    engine = make_engine(batching=batching, max_shared_chunk_tokens=chunk, max_num_batched_tokens=max(8, chunk))
    requests = [make_request(range(i, i + 5 + 7 * i), 5, user=f"user-{i % 3}") for i in range(10)]
    transcript = run_all(engine, *requests)
    for request in requests:
        assert transcript.of(request) == reference_tokens(request)


def test_the_reference_is_what_an_engine_alone_gives() -> None:
    for request in (make_request(range(9), 9), make_request(range(33), 5, temperature=0.7, seed=99)):
        engine = make_engine(runner=FakeModelRunner(num_blocks=64), prefix_caching=False)
        assert run_all(engine, request).of(request) == reference_tokens(request)


def test_keys_of_the_gateway_and_of_output_blocks_are_one_chain() -> None:
    """Blocks of prompt and output are found again by keys that only the full text determines."""
    engine = make_engine()
    request = make_request(range(6), 12)
    output = run_all(engine, request).of(request)
    text = [*range(6), *output]
    keys = KEYER.prompt_keys(text[: (len(text) - 1) // B * B], request.spans)
    assert set(keys) == set(engine.cached_keys())


def test_a_newcomer_is_not_let_in_only_to_be_preempted() -> None:
    """Each running sequence keeps a block in reserve."""
    engine = make_engine(num_blocks=8, max_pinned_fraction=0.0)
    first, second = make_request(range(8), 4), make_request(range(50, 73), 1, user="bob")
    transcript = run_all(engine, first, second)
    assert transcript.finished == [first.request_id, second.request_id]
    assert engine.scheduler.num_preemptions == 0


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    engine = make_engine(num_blocks=6, max_pinned_fraction=0.0)
    warm(engine, make_request(range(17), 1))  # four cached, two free
    run_all(engine, make_request(range(50, 60), 1, user="bob"))  # takes the two, and one that is cached
    again = make_request(range(17), 1)
    assert run_all(engine, again).cached[again.request_id] == 3 * B


def test_the_output_of_every_choice_can_be_found_again() -> None:
    engine = make_engine()
    request = make_request(range(10), 12, n=2, temperature=1.0)
    transcript = run_all(engine, request)
    for choice in range(2):
        follow_up = make_request([*range(10), *transcript.of(request, choice), 3], 1)
        assert run_all(engine, follow_up).cached[follow_up.request_id] == 20


def test_a_purge_between_two_steps_does_not_alarm_the_check() -> None:
    """The twin holds the other's block since the last step; withdrawing that from the cache takes nothing from it."""
    engine = make_engine()
    twins = [make_request(range(12), 4) for _ in range(2)]
    for request in twins:
        engine.add_request(request)
    transcript = Transcript()
    transcript.add(engine.step())
    engine.purge_user(twins[0].user_hash)
    run_all(engine, transcript=transcript)
    assert engine.violations == []
    assert [transcript.of(request) for request in twins] == [reference_tokens(twins[0])] * 2
