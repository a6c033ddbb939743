"""A trace tells where each block came from, and the first step and block at which foreign state came in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.api.errors import InvalidRequestError
from cluster.experiment.block_map import spans
from cluster.experiment.event_file import BlockEvent, EventFile, read_events, write_events
from cluster.experiment.faults.blocks import EvictsBlockInUse
from cluster.experiment.faults.stages import make_stages
from cluster.experiment.plan import make_plan
from cluster.experiment.targets.embedded import EmbeddedTarget
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.targets.weights import LoadedModel
from cluster.experiment.trace import trace_request
from cluster.experiment.workload import Workload
from workers.build import EngineParts
from workers.config import EngineConfig, IsolationCheck

USERS = {"a": "ada", "b": "bo", "c": "ada"}


def event(
    step: int, action: str, block: int, request: str, generation: int = 1, scope: str | None = None
) -> BlockEvent:
    return BlockEvent(0, step, float(step), action, block, generation, request, scope)


OF_A = [
    event(1, "allocate", 7, "a"),
    event(1, "write", 7, "a"),
    event(1, "publish", 7, "a", scope="USER"),
    event(5, "release", 7, "a", scope="USER"),
]


def test_block_of_the_same_user_is_no_foreign_state() -> None:
    found = trace_request(EventFile(USERS, {}, [*OF_A, event(6, "reuse", 7, "c", scope="USER")]), "c")
    assert found.foreign is None
    (touched,) = found.blocks
    assert (touched.block, touched.way, touched.origin, touched.scope) == (7, "reuse", "a", "USER")


def test_block_of_another_user_is() -> None:
    found = trace_request(EventFile(USERS, {}, [*OF_A, event(6, "reuse", 7, "b", scope="USER")]), "b").foreign
    assert found is not None
    assert (found.step, found.block, found.origin) == (6, 7, "a")


def test_block_of_another_session_of_the_same_user_is() -> None:
    request = make_plan(1, 1, Workload(num_sessions=2)).rounds[0].requests
    assert (request[0].user, request[0].owner) == (request[1].user, "ada, conversation 0")
    users = {"a": request[0].owner, "b": request[1].owner, "c": request[2].owner}
    events = [*OF_A, event(6, "reuse", 7, "b", scope="SESSION"), event(6, "reuse", 7, "c", scope="SESSION")]
    found = trace_request(EventFile(users, {}, events), "b").foreign
    assert found is not None
    assert (found.step, found.block, found.origin) == (6, 7, "a")
    assert trace_request(EventFile(users, {}, events), "c").foreign is None


def test_block_of_a_shared_scope_is_not() -> None:
    shared = [replace(one, scope="VARIABLES" if one.scope else None) for one in OF_A]
    found = trace_request(EventFile(USERS, {}, [*shared, event(6, "reuse", 7, "b", scope="VARIABLES")]), "b")
    assert found.foreign is None


def test_hit_on_an_unwritten_block() -> None:
    events = [event(1, "allocate", 7, "a"), event(1, "publish", 7, "a", scope="USER"), event(1, "reuse", 7, "c")]
    found = trace_request(EventFile(USERS, {}, events), "c").foreign
    assert found is not None
    assert (found.step, found.block) == (1, 7)
    assert "before it was written" in found.why


def test_block_given_away_while_held() -> None:
    events = [*OF_A[:2], event(3, "allocate", 7, "b", generation=2), event(9, "release", 7, "a")]
    found = trace_request(EventFile(USERS, {}, events), "a").foreign
    assert found is not None
    assert (found.step, found.block, found.origin) == (3, 7, "b")


def test_a_fault_inside_a_step_shows_no_block_but_the_step() -> None:
    found = trace_request(EventFile(USERS, {"a": 4}, OF_A), "a").foreign
    assert found is not None
    assert (found.step, found.block) == (4, None)


async def test_trace_of_a_real_contamination(tiny: LoadedModel, tmp_path: Path) -> None:
    """A block that is evicted while it is held gets into another request's hands: the trace says which, and when."""
    stage = make_stages(tiny, 1, 2, long_words=40)[-1]
    parts = StackParts(engine=EngineParts(block_pool=EvictsBlockInUse))
    config = replace(stage.condition.engine, isolation_check=IsolationCheck.OFF)
    target = EmbeddedTarget(tiny, config, parts)
    for planned in stage.plan.rounds:
        await target.run_round(planned)
    users = {request.name: request.user for planned in stage.plan.rounds for request in planned.requests}
    write_events(tmp_path / "events", EventFile(users, {}, list(target.events)))
    content = read_events(tmp_path / "events")
    foreign = {name: trace_request(content, name).foreign for name in users}
    assert any(found is not None and "still held" in found.why for found in foreign.values())


async def test_trace_of_clean_rounds_finds_nothing(tiny: LoadedModel) -> None:
    plan = make_plan(1, 3, Workload())
    target = EmbeddedTarget(tiny, EngineConfig(num_blocks=512, max_model_len=2048))
    for planned in plan.rounds:
        await target.run_round(planned)
    users = {request.name: request.user for planned in plan.rounds for request in planned.requests}
    content = EventFile(users, {}, list(target.events))
    traces = [trace_request(content, name) for name in users]
    assert all(found.foreign is None for found in traces)
    assert any(touched.origin != found.request for found in traces for touched in found.blocks), "nothing was shared"


def test_block_map_spans_tell_held_from_cached() -> None:
    found = spans([*OF_A, event(8, "reuse", 7, "c"), event(9, "evict", 7, "a")], last_step=10)
    assert [(span.start, span.end, span.is_cached) for span in found] == [(1, 5, False), (5, 8, True), (8, 9, False)]


def test_a_file_without_events_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nonsense")
    with pytest.raises(InvalidRequestError, match="no block events"):
        read_events(tmp_path / "x")
