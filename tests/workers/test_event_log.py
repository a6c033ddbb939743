"""What `watchword trace` can know: each block's lives, who had a part in them, and where a hit came from."""

from __future__ import annotations

from engine_builders import make_engine, make_request, run_all

from cluster.api.scope import Scope
from workers.block import Block
from workers.event_log import BlockAction, BlockEventLog


def test_a_life_of_a_block_from_allocation_to_eviction() -> None:
    engine = make_engine(num_blocks=8, max_pinned_fraction=0.0)
    first, again, other = make_request(range(5), 1), make_request(range(5), 1), make_request(range(50, 80), 1, user="b")
    for request in (first, again, other):
        run_all(engine, request)
    block_id = next(r.block_id for r in engine.event_log if r.action is BlockAction.PUBLISH)
    life = [(r.action, r.request_id) for r in engine.event_log.of_block(block_id, generation=1)]
    assert life == [
        (BlockAction.ALLOCATE, first.request_id),
        (BlockAction.WRITE, first.request_id),
        (BlockAction.PUBLISH, first.request_id),
        (BlockAction.RELEASE, first.request_id),
        (BlockAction.REUSE, again.request_id),
        (BlockAction.RELEASE, again.request_id),
        (BlockAction.EVICT, first.request_id),
    ]


def test_a_trace_leads_from_a_hit_to_its_writer() -> None:
    engine = make_engine()
    writer, reader, stranger = (
        make_request(range(9), 2),
        make_request(range(9), 2),
        make_request(range(9), 2, user="bob"),
    )
    for request in (writer, stranger, reader):
        run_all(engine, request)
    trace = engine.event_log.trace(reader.request_id)
    assert {record.request_id for record in trace} == {writer.request_id, reader.request_id}
    published = [record for record in trace if record.action is BlockAction.PUBLISH]
    assert published[0].scope is Scope.USER
    assert published[0].request_id == writer.request_id
    assert [r.step_id for r in trace] == sorted(r.step_id for r in trace)
    assert all(record.time_s > 0 for record in trace)


def test_the_ring_forgets_the_oldest_and_says_so() -> None:
    log = BlockEventLog(3)
    for step_id in range(1, 4):
        log.begin_step(step_id, float(step_id))
        log.record(BlockAction.WRITE, Block(step_id), None)
    assert log.is_complete
    log.record(BlockAction.WRITE, Block(9), None)
    assert not log.is_complete
    assert [record.block_id for record in log] == [2, 3, 9]
