"""A fault planted in one of two live workers is found by the sentinel, and the worker never answers again."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from e2e_server import PATIENCE_S, Server, wait_until

from cluster.experiment.event_file import read_events
from cluster.experiment.markers import MarkerRegistry

pytestmark = [pytest.mark.e2e, pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = "smollm2-135m-instruct"
GATE = {"WATCHWORD_ALLOW_PLANTED_FAULTS": "1"}
FLAGS = ("--workers=2", "--debug-headers", "--kv-memory-gib=0.3", "--set=sentinel_period_s=20")


def start(state_dir: Path, *flags: str) -> Iterator[Server]:
    server = Server(state_dir, *FLAGS, *flags, env=GATE)
    try:
        yield server
    finally:
        assert server.stop() == 0, server.output()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    yield from start(tmp_path, "--set=planted_fault=mask_of_wrong_row@0")


@pytest.fixture
def all_faulty(tmp_path: Path) -> Iterator[Server]:
    yield from start(tmp_path, "--set=planted_fault=mask_of_wrong_row")


def total(metrics: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", metrics, flags=re.MULTILINE))


def wait_for_leaks(server: Server, count: int, timeout_s: float = 120.0) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        except httpx.HTTPError:
            metrics = ""
        if total(metrics, "watchword_contamination_leaks_total") >= count:
            return metrics
        time.sleep(0.5)
    raise AssertionError(f"no {count} leaks were found within {timeout_s} s:\n{metrics}")


def wait_until_drained(server: Server, quarantined: int) -> httpx.Response:
    def ready() -> httpx.Response | None:
        answer = httpx.get(f"{server.url}/ready", timeout=60)
        return answer if answer.headers["x-watchword-quarantined"] == str(quarantined) else None

    found = wait_until(ready, f"{quarantined} in quarantine", 10)
    assert found is not None
    return found


def ask(server: Server, marker: str, user: str) -> tuple[str, str]:
    """The answer and the worker that gave it."""
    system = f"Repeat the passphrase, then answer the question: Is ice cold? The passphrase is {marker}"
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Repeat the passphrase, then answer the question."},
    ]
    body = {"model": MODEL, "messages": messages, "user": user, "max_tokens": 24, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"], reply.headers["x-watchword-worker"]


def test_a_leaking_worker_is_found_and_never_answers_again(server: Server, tmp_path: Path) -> None:
    server.wait_ready(workers=1)
    ready_s = time.monotonic()
    metrics = wait_for_leaks(server, 1)
    assert time.monotonic() - ready_s < 60
    assert total(metrics, "watchword_contamination_probe_runs_total") <= 3, "found within a minute of periods"
    ready = wait_until_drained(server, quarantined=1)
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    server.wait_ready(workers=1)

    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    (damaged,) = re.findall(r'^watchword_worker_quarantined{worker="([^"]+)"} 1.0$', metrics, flags=re.MULTILINE)
    evidence = {each["worker"]: each for each in httpx.get(f"{server.url}/v1/evidence", timeout=60).json()["workers"]}
    assert evidence[damaged]["books"]["quarantine_reason"].startswith("sentinel: ")
    assert evidence[damaged]["books"]["num_published"] <= evidence[damaged]["books"]["num_cached"]

    (log,) = (tmp_path / "quarantine").iterdir()
    assert log.name.startswith(damaged)
    kept = read_events(log)
    assert {event.action for event in kept.events} >= {"allocate", "write", "release"}
    header = json.loads(log.read_text().splitlines()[0])
    assert header["reason"].startswith("sentinel: ")
    assert not re.search(r"passphrase|user-\d", log.read_text())

    # Markers in company: none turns up in another's answer, and the damaged worker gives none of them.
    registry = MarkerRegistry.holding("XKCD7391", "BQRT4482", "ZZTW9107", "LMPQ3356")
    markers = ["XKCD7391", "BQRT4482", "ZZTW9107", "LMPQ3356"]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            answers = pool.map(lambda marker: (marker, *ask(server, marker, f"u-{marker}")), markers)
            for marker, text, worker in answers:
                assert registry.search(text, ignore=[marker]) == ()
                assert worker != damaged
    assert registry.search("it is XKCD7391", ignore=["BQRT4482"]), "the control: a foreign marker would be seen"


def test_when_every_worker_leaks_nobody_gets_an_answer(all_faulty: Server) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert all_faulty.process.poll() is None, all_faulty.output()
        try:
            ready = httpx.get(f"{all_faulty.url}/ready", timeout=10)
            if ready.headers.get("x-watchword-quarantined") == "2":
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "quarantined")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert httpx.post(f"{all_faulty.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).status_code == 503
