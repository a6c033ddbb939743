"""/ready and the metrics tell of quarantined workers; the governor's batch size reaches the router."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from front_door import FakeBackend, build_core, client_of
from typer.testing import CliRunner

from cluster.api.errors import InvalidRequestError, PermissionDeniedError
from cluster.api.ids import WorkerId
from cluster.api.worker_state import WorkerInfo, WorkerSnapshot
from cluster.app import planted_fault
from cluster.auth.authenticator import Authenticator
from cluster.cli import app as command_line
from cluster.cluster_metrics import ClusterCollector
from cluster.config import ClusterConfig, load_config
from cluster.http.config import HttpConfig
from cluster.http_app import build_http_app
from cluster.metrics import GatewayMetrics
from cluster.worker_health import WorkerHealth
from router.config import RouterConfig
from router.registry import Registry
from router.stats import Counters, RouterStats, WorkerStats


def snapshot(**changes: Any) -> WorkerSnapshot:
    values: dict[str, Any] = {"counters": (("isolation_violations", 2), ("checksum_failures", 1), ("quarantined", 1))}
    return WorkerSnapshot(WorkerId("w0"), "e1", 0, 0, 0, 0, 0.0, 0.0, (), **{**values, **changes})


def stats(*snapshots: WorkerSnapshot | None) -> RouterStats:
    workers = [
        WorkerStats(WorkerId(f"w{number}"), "e1", True, False, False, 0, 0, 0.0, 0.0, 0.0, each)
        for number, each in enumerate(snapshots)
    ]
    return RouterStats(Counters(), 0, 0, tuple(workers))


def door(backend: FakeBackend, read: Any) -> Any:
    health = WorkerHealth(read)
    return build_http_app(
        build_core(backend),
        Authenticator(None, allow_anonymous=True),
        GatewayMetrics(),
        HttpConfig(),
        count_quarantined=health.count_quarantined,
    )


async def ready(backend: FakeBackend, *snapshots: WorkerSnapshot | None) -> tuple[int, str, str]:
    async def read() -> RouterStats:
        return stats(*snapshots)

    async with client_of(door(backend, read)) as client:
        reply = await client.get("/ready")
    body = reply.json()
    word = body.get("status") or body["error"]["code"]
    return reply.status_code, word, reply.headers["x-watchword-quarantined"]


async def test_ready_tells_of_quarantine() -> None:
    sound = snapshot(counters=(("quarantined", 0),))
    assert await ready(FakeBackend(), sound) == (200, "ready", "0")
    assert await ready(FakeBackend(), sound, snapshot()) == (200, "degraded", "1")
    assert await ready(FakeBackend(ready=False), snapshot()) == (503, "quarantined", "1")
    assert await ready(FakeBackend(ready=False), None) == (503, "not_ready", "0")


async def test_the_last_word_stands_while_the_router_is_gone() -> None:
    answers: list[RouterStats | None] = [stats(snapshot())]

    async def read() -> RouterStats | None:
        return answers[0]

    health = WorkerHealth(read)
    assert await health.quarantined() == ("w0",)
    answers[0] = None
    health._read_s = -1e9
    assert await health.quarantined() == ("w0",)


def test_violations_and_quarantine_are_metrics() -> None:
    metrics, collector = GatewayMetrics(), ClusterCollector()
    collector.stats = stats(snapshot())
    metrics.registry.register(collector)
    text = metrics.render().decode()
    assert 'watchword_isolation_violations_total{worker="w0"} 3.0' in text
    assert 'watchword_worker_quarantined{worker="w0"} 1.0' in text


def test_what_a_worker_ran_before_it_fell_silent_runs_no_more() -> None:
    metrics, collector = GatewayMetrics(), ClusterCollector()
    metrics.registry.register(collector)
    heard = stats(replace(snapshot(), num_running=3, num_waiting=2))
    for said, running, waiting in (
        (heard, 3.0, 2.0),
        (replace(heard, workers=(replace(heard.workers[0], is_heard=False),)), 0.0, 0.0),
    ):
        collector.stats = said
        text = metrics.render().decode()
        assert f'watchword_requests_running{{worker="w0"}} {running}' in text
        assert f'watchword_requests_waiting{{worker="w0"}} {waiting}' in text


def test_a_worker_is_heard_while_its_heartbeats_come_also_when_it_takes_no_work() -> None:
    config = RouterConfig()
    registry = Registry(config)
    registry.register(WorkerInfo(WorkerId("w0"), "e1", "address", "m", "n", 16, 100, 64, 512), 0.0)
    record = registry.report(snapshot(is_draining=True), 1.0)
    assert record is not None
    assert (registry.is_heard(record, 1.5), registry.is_live(record, 1.5)) == (True, False)
    assert not registry.is_heard(record, 1.1 + config.heartbeat_ttl_s)


def test_a_batch_size_that_changed_is_what_the_router_plans_with() -> None:
    registry = Registry(RouterConfig())
    info = WorkerInfo(WorkerId("w0"), "e1", "address", "m", "n", 16, 100, 64, 512)
    registry.register(info, 0.0)
    record = registry.report(snapshot(max_num_seqs=4), 1.0)
    assert record is not None
    assert (record.info.max_num_seqs, record.load.candidate.max_num_seqs) == (4, 4)
    record = registry.report(snapshot(max_num_seqs=0), 2.0)
    assert record is not None
    assert record.info.max_num_seqs == 4


def test_auto_needs_the_sentinel_and_reaches_no_further_than_its_limit() -> None:
    assert load_config({"max_num_seqs": "auto", "max_num_seqs_limit": 32}, environ={}).largest_batch == 32
    assert load_config({"max_num_seqs": "12"}, environ={}).largest_batch == 12
    with pytest.raises(InvalidRequestError, match="needs the sentinel"):
        load_config({"max_num_seqs": "auto", "sentinel_period_s": 0}, environ={})
    for field, value in (("max_num_seqs", 0), ("max_num_seqs", "many"), ("verify_checksums", 1.5)):
        with pytest.raises(InvalidRequestError, match=field):
            load_config({field: value}, environ={})
    assert ClusterConfig().sentinel_period_s > 0, "on by default"


def test_a_planted_fault_is_refused_without_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHWORD_ALLOW_PLANTED_FAULTS", raising=False)
    assert planted_fault(None) is None
    with pytest.raises(PermissionDeniedError):
        planted_fault("mask_of_wrong_row")
    monkeypatch.setenv("WATCHWORD_ALLOW_PLANTED_FAULTS", "1")
    planted = planted_fault("mask_of_wrong_row@1")
    assert planted is not None
    assert (planted.name, planted.rank) == ("mask_of_wrong_row", 1)
    with pytest.raises(InvalidRequestError, match="no planted fault"):
        planted_fault("nothing")


def test_trace_reads_a_kept_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    event = {"life": 0, "step": 1, "time_s": 0.0, "action": "allocate", "block": 3, "generation": 1}
    lines = [
        {"users": {"a": "1", "b": "2"}, "corrupted": {}, "reason": "x"},
        {**event, "request": "a", "scope": None},
        {**event, "request": "a", "scope": None, "action": "write"},
        {**event, "request": "b", "scope": "USER", "action": "reuse", "step": 2},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    found = CliRunner().invoke(command_line, ["trace", str(path), "b"])
    assert found.exit_code == 1
    assert re.search(r"foreign state came in at step 2, block 3, from a", found.stdout)
    clean = CliRunner().invoke(command_line, ["trace", str(path), "a"])
    assert (clean.exit_code, "no foreign state" in clean.stdout) == (0, True)
