"""Reports hold the verdict, stand alone, and hold no prompt or answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from scripted_target import ScriptedTarget, leaky, obedient
from typer import Typer
from typer.testing import CliRunner

from cluster.api.errors import InvalidRequestError
from cluster.experiment.cli import experiment
from cluster.experiment.plan import make_plan
from cluster.experiment.report_html import html_report
from cluster.experiment.report_json import experiment_record
from cluster.experiment.report_text import print_experiment, print_matrix
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
    markers = [request.marker for planned in PLAN.rounds for request in planned.requests]
    assert not any(marker in text for marker in markers)


async def test_html_is_one_file_that_fetches_nothing(tiny: LoadedModel) -> None:
    target = EmbeddedTarget(tiny, EngineConfig(num_blocks=256, max_model_len=1024))
    await target.run_round(PLAN.rounds[0])
    page = html_report([await result_of(), await result_of(leaky)], list(target.events))
    assert page.count("<svg") == 2
    assert "held by r0.A" in page
    assert "contaminated" in page
    assert "clean" in page
    assert not re.search(r"""(src|href)=|url\(|@import|<script""", page)


async def test_terminal_report_names_counts_interval_and_verdict() -> None:
    console = Console(record=True, width=160)
    print_experiment(console, await result_of(leaky))
    print_matrix(console, [await result_of(), await result_of(leaky)])
    text = console.export_text()
    assert "A's marker in B's answer" in text
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
