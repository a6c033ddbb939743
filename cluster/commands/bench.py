"""`watchword bench`: drives a running server with one of the workloads and prints what came of it."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from rich.progress import Progress

from cluster.api.terminal import width_of
from cluster.bench.driver import BenchTarget, run_workload
from cluster.bench.report import print_summary, summarise
from cluster.bench.workload import Conversation, WorkloadName, build_workload, default_concurrency
from cluster.commands.options import ApiKey, ServerUrl

console = Console(width=width_of(sys.stdout))


def bench(
    workload: Annotated[str, typer.Option(help="A shared prefixes, B unique, C multi-turn, W warm-up")] = "A",
    url: ServerUrl = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="default: the server's first model")] = None,
    users: Annotated[int, typer.Option(min=1, help="spread the requests over so many users")] = 12,
    concurrency: Annotated[int, typer.Option(min=0, help="requests at a time; 0: the workload's own")] = 0,
    seed: Annotated[str | None, typer.Option(help="same seed, same text; default: random")] = None,
    templates: Annotated[bool, typer.Option(help="register the system prompts of A as prompt templates first")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure a running server: output tokens/s, TTFT, inter-token latency and cached tokens."""
    name = workload.upper()
    if name not in ("A", "B", "C", "W"):
        raise typer.BadParameter(f"{workload!r} is not one of A, B, C, W", param_hint="--workload")
    seed = seed or secrets.token_hex(4)
    base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
    summary = asyncio.run(
        measure(
            name,  # type: ignore[arg-type]  # one of the four, as just checked
            base_url,
            api_key,
            users=users,
            seed=seed,
            templates=templates,
            model=model,
            concurrency=concurrency,
        )
    )
    print_summary(console, summary)
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if summary["errors"]:
        raise typer.Exit(1)


async def measure(
    name: WorkloadName,
    base_url: str,
    api_key: str | None,
    *,
    users: int,
    seed: str,
    templates: bool = False,
    model: str | None = None,
    concurrency: int = 0,
) -> dict[str, Any]:
    """Runs one workload and returns its figures (cluster/bench/report.py). `base_url` ends in /v1."""
    model = model or await _first_model(base_url, api_key)
    conversations = build_workload(name, seed, users)
    registered = await _register(base_url, api_key, conversations, seed) if templates else {}
    target = BenchTarget(base_url, model, api_key, templates=registered)
    concurrency = concurrency or default_concurrency(name)
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(f"workload {name}", total=None)
            result = await run_workload(
                target,
                conversations,
                concurrency,
                lambda done, total: progress.update(task, completed=done, total=total),
            )
    finally:
        await _unregister(base_url, api_key, registered)
    return summarise(name, seed, concurrency, users, result)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def _first_model(base_url: str, api_key: str | None) -> str:
    async with aiohttp.ClientSession(headers=_headers(api_key)) as session:
        try:
            async with session.get(f"{base_url}/models") as response:
                body = await response.json()
        except aiohttp.ClientError as error:
            raise typer.BadParameter(f"no server at {base_url}: {error}", param_hint="--url") from None
    if response.status != 200:
        raise typer.BadParameter(f"{base_url}/models answered {response.status}: {body}", param_hint="--api-key")
    return str(body["data"][0]["id"])


async def _register(base_url: str, api_key: str | None, conversations: list[Conversation], seed: str) -> dict[str, str]:
    """Registers each distinct system prompt as a template; returns text -> id."""
    systems = sorted({conversation.system for conversation in conversations if conversation.system is not None})
    registered = {}
    async with aiohttp.ClientSession(headers=_headers(api_key)) as session:
        for number, system in enumerate(systems):
            template_id = f"bench-{seed}-{number}"
            body = {"messages": [{"role": "system", "content": system}], "share": "template"}
            async with session.put(f"{base_url}/prompts/{template_id}", json=body) as response:
                if response.status >= 300:
                    raise typer.BadParameter(f"template refused: {await response.text()}", param_hint="--templates")
            registered[system] = template_id
    return registered


async def _unregister(base_url: str, api_key: str | None, registered: dict[str, str]) -> None:
    """Templates of an ended run would hold pinned blocks, and those of the next would not fit beside them."""
    async with aiohttp.ClientSession(headers=_headers(api_key)) as session:
        for template_id in registered.values():
            async with session.delete(f"{base_url}/prompts/{template_id}"):
                pass
