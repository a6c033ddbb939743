"""`watchword serve`: a whole cluster on this machine, in the foreground, and nothing of it left afterwards."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.api.terminal import width_of
from cluster.config import ClusterConfig, load_config
from cluster.config_sources import parse_value

console = Console(stderr=True, width=width_of(sys.stderr))

READY_TIMEOUT_S = 600.0


def serve(
    model: Annotated[str | None, typer.Option(help="'smollm2', a model folder, a GGUF file or a hub id")] = None,
    workers: Annotated[int | None, typer.Option(help="worker replicas")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on; a public one needs API keys")] = None,
    http_port: Annotated[int | None, typer.Option(help="port of the OpenAI API")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="port of the gRPC API")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis of the prefix index; default: one of our own")] = None,
    max_num_seqs: Annotated[str | None, typer.Option(help="sequences in one step of a worker, or 'auto'")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="longest prompt plus output, in tokens")] = None,
    kv_memory_gib: Annotated[float | None, typer.Option(help="memory of a worker's KV pool")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of a worker")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    lora: Annotated[list[str] | None, typer.Option(help="a LoRA adapter: NAME=FOLDER, repeatable")] = None,
    debug_headers: Annotated[bool | None, typer.Option(help="show X-Watchword-Worker to every caller")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with any setting", envvar="WATCHWORD_CONFIG")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any other setting: NAME=VALUE, repeatable")] = None,
) -> None:
    """Serve a model over HTTP (OpenAI API) and gRPC until Ctrl-C.

    Settings come from defaults, then the --config file, then WATCHWORD_* variables, then these flags. `--set`
    reaches every setting that has no flag of its own, for example --set batching=static --set prefix_caching=false.
    """
    flags: dict[str, Any] = {
        "model": model,
        "workers": workers,
        "host": host,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "redis_url": redis_url,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "kv_memory_gib": kv_memory_gib,
        "threads": threads,
        "dtype": dtype,
        "device": device,
        "lora": _parse_settings(lora, "--lora", str) if lora else None,
        "debug_headers": debug_headers,
        **_parse_settings(set_ or [], "--set", lambda name: name.replace("-", "_")),
    }
    run_local(load_config(flags, config_file=config))


def run_local(config: ClusterConfig) -> None:
    """Brings everything up, prints the addresses, waits for SIGINT or SIGTERM, drains and takes it all down."""
    from cluster.local import LocalCluster  # ray and torch take seconds to import: not for --help

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stop.set())
    started = time.monotonic()

    def report(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:5.1f} s[/dim]  {text}")

    cluster = LocalCluster(config, report)
    try:
        cluster.start()
        if cluster.wait_ready(READY_TIMEOUT_S, stop):
            _print_addresses(cluster, time.monotonic() - started)
        # Not one endless wait: a signal that comes while the process is suspended (Ctrl-Z) may later be given to
        # another thread, and then Python runs its handler only when this one wakes for some reason of its own.
        while not stop.wait(1.0):
            pass
        console.print("stopping: running requests may finish; press Ctrl-C again to cut them short")
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cluster.stop()
    console.print("stopped")


def _parse_settings(pairs: list[str], option: str, spell: Callable[[str], str]) -> dict[str, Any]:
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint=option)
        settings[spell(name)] = parse_value(value, f"{option} {name}")
    return settings


def _print_addresses(cluster: Any, seconds: float) -> None:
    http, grpc, key = cluster.http_address, cluster.grpc_address, cluster.access.needs_key
    out = Console(width=width_of(sys.stdout))
    out.print(f"\n[bold]Watchword is ready[/bold] after {seconds:.0f} s")
    out.print(f"  HTTP  http://{http}   (OpenAI API under /v1)\n  gRPC  {grpc}\n")
    header = '  -H "Authorization: Bearer YOUR_KEY" \\\n' if key else ""
    body = (
        '{"model": "%s", "user": "me", "max_tokens": 40, "temperature": 0, '
        '"messages": [{"role": "user", "content": "Name three rivers."}]}'
    )
    out.print(
        f"curl http://{http}/v1/chat/completions -H 'Content-Type: application/json' \\\n{header}"
        f"  -d '{body % cluster.model_name}'\n",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
