"""Reports hold the verdict, stand alone, and hold no prompt or answer."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from scripted_target import ScriptedTarget, leaky, obedient
from typer import Typer
from typer.testing import CliRunner

from cluster.api.errors import InvalidRequestError
from cluster.experiment.bisect import Bisection, Outcome, Trial
from cluster.experiment.block_map import Mark, block_map
from cluster.experiment.cli import experiment
from cluster.experiment.component import Component
from cluster.experiment.plan import make_plan
from cluster.experiment.report_html import html_report
from cluster.experiment.report_json import bisection_record, experiment_record
from cluster.experiment.report_text import print_bisection, print_experiment, print_matrix
from cluster.experiment.runner import ExperimentResult, run_experiment
from cluster.experiment.targets.embedded import EmbeddedTarget
from cluster.experiment.targets.weights import LoadedModel
from cluster.experiment.timing import MIN_PAIRS, Samples, measure
from cluster.experiment.verdict import Status
from cluster.experiment.workload import Workload
from workers.config import EngineConfig

PLAN = make_plan(1, 6, Workload())


async def result_of(answer=obedient) -> ExperimentResult:
    return await run_experiment(ScriptedTarget(answer), PLAN, condition="the condition")


async def test_json_holds_the_verdict_and_no_text() -> None:
    text = json.dumps(experiment_record(await result_of(leaky)))
    record = json.loads(text)
    assert (record["verdict"], record["exit_status"], record["seed"]) == ("contaminated", 1, 1)
    assert record["marker_rate"]["hits"] == 2
    assert len(record["rounds"]) == 6
    assert {name: found["hits"] for name, found in record["own_rate_by_wording"].items()} == {
        "system-last": 6,
        "confirmed": 6,
    }
    markers = [request.marker for planned in PLAN.rounds for request in planned.requests]
    assert not any(marker in text for marker in markers)


async def test_html_is_one_file_that_fetches_nothing(tiny: LoadedModel) -> None:
    target = EmbeddedTarget(tiny, EngineConfig(num_blocks=256, max_model_len=1024))
    await target.run_round(PLAN.rounds[0])
    page = html_report([await result_of(), await result_of(leaky)], list(target.events), mapped="the condition")
    assert page.count("<svg") == 2
    assert "round 0" in page
    assert "12 requests in 6 rounds" not in page, "the banner counts all conditions"
    assert "2 with a foreign marker" in page
    assert "held by r0.A" in page
    assert "contaminated" in page
    assert "clean" in page
    assert not re.search(r"""(src|href)=|url\(|@import|<script""", page)


async def test_the_map_marks_where_something_was_found(tiny: LoadedModel) -> None:
    target = EmbeddedTarget(tiny, EngineConfig(num_blocks=256, max_model_len=1024))
    await target.run_round(PLAN.rounds[0])
    events = list(target.events)
    picture = block_map(events, [Mark(2, 1, "r0.A foreign_reuse"), Mark(3, None, "r0.B logits"), Mark(10**6, 1, "far")])
    assert "step 2: r0.A foreign_reuse" in picture
    assert "step 3: r0.B logits" in picture
    assert "far" not in picture
    restarted = [*events, replace(events[0], life=1)]
    assert "foreign_reuse" not in block_map(restarted, [Mark(2, 1, "r0.A foreign_reuse")]), "of which life is it?"


async def test_a_bisection_is_in_every_report() -> None:
    trials = (Trial(("prefix cache off",), Outcome.STILL, 6, 2), Trial(("other layout",), Outcome.CLEARED, 6, 0))
    for named, shown in ((Component.LAYOUT_MASK, "layout_mask"), (None, "undecided")):
        found = Bisection(trials, named)
        console = Console(record=True, width=160)
        print_bisection(console, found)
        assert f"component: {shown}" in console.export_text()
        page = html_report([await result_of(leaky)], [], bisection=found)
        assert f"<code>{shown}</code>" in page
        assert "still contaminated" in page
    assert bisection_record(Bisection(trials, Component.KEY)) == {
        "component": "key",
        "trials": [
            {"switches": ["prefix cache off"], "outcome": "still contaminated", "rounds": 6, "contaminated": 2},
            {"switches": ["other layout"], "outcome": "cleared", "rounds": 6, "contaminated": 0},
        ],
    }


async def test_terminal_report_names_counts_interval_and_verdict() -> None:
    console = Console(record=True, width=160)
    print_experiment(console, await result_of(leaky))
    print_matrix(console, [await result_of(), await result_of(leaky)])
    text = console.export_text()
    assert "A's marker in B's answer" in text
    assert re.search(r"asked for as system-last *│ 6 of 6", text)
    assert "2/6 = 33.33% (95 %:" in text
    assert "verdict: contaminated" in text
    assert "the condition" in text


async def test_timing_needs_its_size_and_sees_ones_own_cache(tiny: LoadedModel) -> None:
    target = EmbeddedTarget(tiny, EngineConfig(num_blocks=2048, max_model_len=1024))
    with pytest.raises(ValueError, match=f"at least {MIN_PAIRS}"):
        await measure(target, Samples("tiny", seed=1), num_pairs=10)


@pytest.mark.slow
async def test_timing_of_strangers_tells_nothing_and_of_oneself_does(tiny: LoadedModel) -> None:
    target = EmbeddedTarget(tiny, EngineConfig(num_blocks=2048, max_model_len=1024))
    result = await measure(target, Samples("tiny", seed=1))
    assert result.own.rejects
    assert result.status is Status.CLEAN


def test_command_line_teaches_and_refuses(tmp_path: Path) -> None:
    app = Typer()
    app.command()(experiment)
    app.command()(lambda: None)  # a second command, so that the first keeps its name
    runner = CliRunner()
    shown = runner.invoke(app, ["experiment", "--help"], env={"COLUMNS": "200"}).output
    for option in (
        "--embedded",
        "--url",
        "--matrix",
        "--bisect",
        "--planted",
        "--timing",
        "--json",
        "--html",
        "--seed",
    ):
        assert option in shown
    refused = runner.invoke(app, ["experiment", "--url", "http://x", "--matrix"])
    assert isinstance(refused.exception, InvalidRequestError)
    unplayable = runner.invoke(app, ["experiment", "--replay", str(tmp_path / "none"), "--url", "http://127.0.0.1:9"])
    assert isinstance(unplayable.exception, InvalidRequestError)
