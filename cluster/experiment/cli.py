"""`watchword experiment` as a function for typer. Heavy imports happen when it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cluster.api.errors import InvalidRequestError

DEFAULT_ROUNDS = 50


def experiment(
    embedded: Annotated[bool, typer.Option("--embedded", help="start an engine in this process (default)")] = False,
    url: Annotated[str | None, typer.Option(help="run against this OpenAI-compatible server instead")] = None,
    api_key: Annotated[str | None, typer.Option(help="key for --url", envvar="WATCHWORD_API_KEY")] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="rounds of two marked requests each; --planted: at most 4 a stage")
    ] = DEFAULT_ROUNDS,
    model: Annotated[str | None, typer.Option(help="model folder, GGUF file, hub id, or name at --url")] = None,
    wording: Annotated[str, typer.Option(help="wordings by name, comma-separated, or 'all'")] = "system-last,confirmed",
    seed: Annotated[int | None, typer.Option(help="same seed, same prompts and arrivals")] = None,
    replay: Annotated[Path | None, typer.Option(help="run the plan recorded in this file")] = None,
    record: Annotated[Path | None, typer.Option(help="write the plan to this file")] = None,
    exact: Annotated[bool, typer.Option(help="compare every answer with its solo run, bit for bit")] = True,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="all conditions: lengths, prefixes, pressure, aborts, …")
    ] = False,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="name the component that leaks, one switch at a time")
    ] = False,
    planted: Annotated[
        str | None, typer.Option(help="plant faults, find and locate each: names, 'all', or FILE.py:NAME")
    ] = None,
    fault: Annotated[str | None, typer.Option(help="run the experiment with this one fault planted")] = None,
    timing: Annotated[bool, typer.Option("--timing", help="does time tell one user what another one cached?")] = False,
    requests: Annotated[
        int | None, typer.Option(min=1, help="a long run on the clean engine: so many requests, resumable")
    ] = None,
    state_file: Annotated[
        Path | None,
        typer.Option(
            "--state",
            help="keeps what --requests, --planted, --matrix or --timing have done; they go on from there",
        ),
    ] = None,
    chinese_must_obey: Annotated[bool, typer.Option(help="void the run when Chinese prompts are not obeyed")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the results here")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="write a report with plots here")] = None,
    events_file: Annotated[Path | None, typer.Option("--events", help="write the block events here, for trace")] = None,
) -> None:
    """The passphrase experiment: does anything of one request turn up in another?

    Exit status: 0 clean, 1 contaminated, 2 void (the run could not have seen a leak).
    """
    from cluster.experiment.command import run_command
    from cluster.experiment.options import ExperimentOptions

    if embedded and url is not None:
        raise InvalidRequestError("--embedded and --url exclude each other", param="url")
    options = ExperimentOptions(
        url=url,
        api_key=api_key,
        rounds=rounds,
        model=model,
        wording=wording,
        seed=seed,
        replay=replay,
        record=record,
        exact=exact,
        matrix=matrix,
        bisect=bisect,
        planted=planted,
        fault=fault,
        timing=timing,
        requests=requests,
        state_file=state_file,
        chinese_must_obey=chinese_must_obey,
        json_file=json_file,
        html_file=html_file,
        events_file=events_file,
    )
    raise typer.Exit(asyncio.run(run_command(options)))
