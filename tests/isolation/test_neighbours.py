"""Masks carry content and positions carry lengths: what the exchange of the neighbours' content tells apart."""

from __future__ import annotations

import asyncio

import pytest
from scripted_target import ScriptedTarget

from cluster.experiment.finding import Finding, OracleName
from cluster.experiment.neighbours import depends_on_neighbours
from cluster.experiment.observation import Observation, TokenTrace
from cluster.experiment.plan import PlannedRequest, Round, make_plan
from cluster.experiment.workload import Workload

NUM_CACHED = 48


def _answer(token_id: int) -> Observation:
    return Observation("r1.A", engine_tokens=(TokenTrace(token_id),), num_cached_tokens=NUM_CACHED)


class _Alone:
    async def solo(self, request: PlannedRequest) -> Observation:
        return _answer(1)


@pytest.mark.parametrize("reads_neighbours", [True, False])
def test_only_what_reads_its_neighbours_changes_with_their_content(reads_neighbours: bool) -> None:
    plan = make_plan(1, 2, Workload())
    kept: set[int | None] = set()

    def corrupted(request: PlannedRequest, planned: Round) -> Observation:
        neighbour = next(one for one in planned.requests if one.role == "B")
        if planned.index == 1:
            kept.add(neighbour.reversed_after)
        return _answer(3 if reads_neighbours and neighbour.reversed_after is not None else 2)

    wrong = Finding(OracleName.EXACTNESS, "logits", 1, "r1.A", "other logits")
    depends = asyncio.run(depends_on_neighbours(lambda: ScriptedTarget(corrupted), plan, wrong, _Alone()))
    assert depends is reads_neighbours
    assert kept == {None, NUM_CACHED}, "what was read from the cache must stay, or other steps are compared"
