"""A long run can be interrupted and goes on where it stopped; a finding ends it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.experiment.condition import Condition, baseline
from cluster.experiment.finding import Finding, OracleName
from cluster.experiment.long_run import LongRun, continue_run
from cluster.experiment.observation import RoundObservation
from cluster.experiment.plan import Round
from cluster.experiment.targets.house_rules import REGIONS
from cluster.experiment.targets.weights import LoadedModel
from cluster.experiment.trial import make_oracles
from cluster.experiment.workload import Workload
from workers.config import EngineConfig

CONDITIONS = [Condition("small", EngineConfig(num_blocks=256, max_model_len=1024))]


class Accuser:
    """An oracle that always finds something."""

    async def judge(self, planned: Round, seen: RoundObservation) -> list[Finding]:
        return [Finding(OracleName.STRUCTURE, "test", planned.index, None, "as told")]


async def run(state: LongRun, path: Path, loaded: LoadedModel, num_requests: int, *oracles: object) -> LongRun:
    return await continue_run(
        state,
        path,
        loaded,
        CONDITIONS,
        num_requests=num_requests,
        rounds_per_chunk=2,
        make_oracles=lambda loaded, condition: oracles,
        progress=lambda state: None,
    )


async def test_run_goes_on_where_it_stopped(tiny: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    first = await run(LongRun.load(path, seed=5), path, tiny, 8)
    assert (first.num_chunks, first.num_requests, first.num_shared) == (1, 8, 2)
    again = LongRun.load(path, seed=99)
    assert (again.seed, again.num_chunks) == (5, 1)
    done = await run(again, path, tiny, 20)
    assert (done.num_chunks, done.num_requests, done.findings) == (3, 24, [])


async def test_a_finding_ends_it_and_is_kept(tiny: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    state = await run(LongRun(1), path, tiny, 1000, Accuser())
    assert state.num_chunks == 1
    assert json.loads(path.read_text())["findings"][0]["kind"] == "test"


@pytest.mark.slow
async def test_two_thousand_requests_raise_no_alarm(tiny: LoadedModel, tmp_path: Path) -> None:
    load = Workload(wordings=("system-last", "confirmed", "zh-system-last", "original"))
    conditions = [
        baseline(load),
        baseline(replace(load, mixed_sampling=True, abort_fraction=0.3, concurrency=4)),
        baseline(replace(load, context_words=(20, 40), prefix_similarity=0.5)),
        baseline(replace(load, regions=REGIONS, concurrency=4)),
    ]
    state = await continue_run(
        LongRun(11),
        tmp_path / "state.json",
        tiny,
        conditions,
        num_requests=2000,
        rounds_per_chunk=40,
        make_oracles=make_oracles,
        progress=lambda state: None,
    )
    assert state.num_requests >= 2000
    assert state.num_shared >= 0.9 * state.num_rounds
    assert state.findings == []
