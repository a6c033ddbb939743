"""The judgements behind `watchword check`: one piece of evidence changed turns its line red, and no other."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest

from cluster.checks.inside import inside_lines, key_faults
from cluster.checks.live_server import Reply
from cluster.checks.outside import authentication, monitoring

Evidence = dict[str, Any]


def worker(number: int) -> Evidence:
    return {
        "worker": f"w{number}",
        "epoch": f"e{number}",
        "numerics": "bf16-1",
        "layout": {"position_faults": [], "mask_faults": [], "not_done": "", "num_comparisons": 6},
        "index": {"num_believed": 2, "num_held": 2, "is_equal": True},
        "books": {
            "key_digest": "same",
            "quarantine_reason": "",
            "broken_law": "",
            "num_free": 95,
            "num_cached": 2,
            "num_in_use": 3,
            "num_blocks": 100,
            "counters": {"isolation_violations": 0, "preemptions": 0, "prefix_cache_evictions": 0},
            "settings": {
                "isolation_check": "check",
                "layout": "packed",
                "block_size": "16",
                "max_num_seqs": "2",
                "max_model_len": "1024",
            },
        },
    }


def sound() -> Evidence:
    gateway = {
        "lets_anyone_in": False,
        "fields_missing_in_key": [],
        "key_digest": "same",
        "sentinel_period_s": 60.0,
    }
    return {"gateway": gateway, "workers": [worker(0), worker(1)]}


def changed(*path: Any, to: Any) -> Evidence:
    """Sound evidence with one place of the first worker's set to another value."""
    evidence = sound()
    place = evidence["workers"][0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return evidence


def red(evidence: Evidence) -> dict[str, str]:
    return {line.name: line.evidence for line in inside_lines(evidence) if not line.passed}


def test_sound_evidence_is_green() -> None:
    assert red(sound()) == {}
    assert key_faults(sound()) == []


@pytest.mark.parametrize(
    ("evidence", "name", "says"),
    [
        (changed("unreachable", to="timeout"), "workers", "cannot be reached"),
        (changed("books", "quarantine_reason", to="a leak"), "workers", "is quarantined: a leak"),
        (changed("layout", "position_faults", to=["decode"]), "positions per request", "row's decode starts"),
        (changed("layout", "mask_faults", to=["padding is read"]), "mask for padding and packing", "padding is read"),
        (changed("books", "broken_law", to="block 3 twice"), "reference counts", "block 3 twice"),
        (changed("books", "num_free", to=94), "reference counts", "do not add up"),
        (changed("books", "counters", "isolation_violations", to=1), "reference counts", "1 violations"),
        (changed("books", "settings", "isolation_check", to="off"), "reference counts", "check is off"),
        (changed("books", "settings", "max_num_seqs", to="7"), "eviction pressure", "requests of 25% of the context"),
        (changed("books", "counters", "preemptions", to=4), "eviction pressure", "4 requests were preempted"),
        (changed("index", "is_equal", to=False), "restart", "earlier life"),
        (changed("index", "num_believed", to=None), "restart", "does not say"),
        (changed("epoch", to="e1"), "restart", "under one epoch"),
        (changed("numerics", to="bf16-2"), "restart", "numerics differ"),
    ],
)
def test_one_broken_thing_turns_its_line_red(evidence: Evidence, name: str, says: str) -> None:
    found = red(evidence)
    assert found.keys() == {name}
    assert says in found[name]


def test_workers_that_are_not_bit_exact_are_red_by_their_positions() -> None:
    evidence = sound()
    for each in evidence["workers"]:
        each["numerics"] = "inexact-1"
    assert red(evidence).keys() == {"positions per request"}


def test_a_comparison_that_was_not_made_is_no_evidence() -> None:
    assert red(changed("layout", "not_done", to="busy")).keys() == {
        "positions per request",
        "mask for padding and packing",
    }


def test_without_a_worker_nothing_is_green() -> None:
    lines = inside_lines(sound() | {"workers": []})
    assert not any(line.passed for line in lines)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda evidence: evidence["gateway"].update(fields_missing_in_key=["session"]), "session can change"),
        (lambda evidence: evidence["workers"][0]["books"].update(key_digest="another"), "w0 derives other keys"),
    ],
)
def test_what_is_wrong_with_keys_is_named(change: Callable[[Evidence], None], says: str) -> None:
    evidence = copy.deepcopy(sound())
    change(evidence)
    (fault,) = key_faults(evidence)
    assert says in fault


class ScriptedServer:
    """Answers GETs: one status for callers without a valid key by path, and a page of metrics."""

    def __init__(self, metrics: str = "", open_paths: tuple[str, ...] = ()) -> None:
        self._metrics = metrics
        self._open_paths = open_paths

    async def get(self, path: str) -> Reply:
        return Reply(200, self._metrics, None)

    async def get_as(self, api_key: str | None, path: str) -> Reply:
        return Reply(200 if path in self._open_paths else 401, "", None)


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/evidence"])
async def test_a_door_that_lets_strangers_in_is_red(path: str) -> None:
    assert (await authentication(ScriptedServer(), sound())).passed  # type: ignore[arg-type]
    line = await authentication(ScriptedServer(open_paths=(path,)), sound())  # type: ignore[arg-type]
    assert not line.passed
    assert f"{path} answered 200 to no key" in line.evidence


METRICS = """\
watchword_isolation_violations_total{worker="w0"} 0.0
watchword_contamination_probe_runs_total{result="clean"} 3.0
watchword_contamination_probe_runs_total{result="leak"} 0.0
watchword_contamination_leaks_total 0.0
watchword_contamination_probe_last_run_seconds NOW
watchword_worker_quarantined{worker="w0"} 0.0
watchword_worker_up{worker="w0"} 1.0
watchword_requests_total{tenant="t"} 1.0
"""


async def monitoring_says(metrics: str, period_s: float | None = 60.0) -> str | None:
    """None when the line is green."""
    evidence = sound()
    evidence["gateway"]["sentinel_period_s"] = period_s
    page = metrics.replace("NOW", str(time.time()))
    line = await monitoring(ScriptedServer(page), evidence, patience_s=0.0)  # type: ignore[arg-type]
    return None if line.passed else line.evidence


@pytest.mark.parametrize(
    "name", [text.split("{")[0].split(" ")[0] for text in METRICS.splitlines() if "last" not in text]
)
async def test_a_missing_metric_is_red(name: str) -> None:
    assert await monitoring_says(METRICS) is None
    without = "".join(text + "\n" for text in METRICS.splitlines() if not text.startswith(name))
    assert f"{name} is not among the metrics" in (await monitoring_says(without) or "")


@pytest.mark.parametrize(
    ("metrics", "period_s", "says"),
    [
        (METRICS, None, "the sentinel is off"),
        (METRICS.replace('{result="clean"} 3.0', '{result="clean"} 0.0'), 60.0, "not finished a clean run"),
        (METRICS.replace("NOW", "1000.0"), 60.0, "last run was"),
        (METRICS.replace("leaks_total 0.0", "leaks_total 2.0"), 60.0, "found 2 leaks"),
    ],
)
async def test_a_sentinel_that_does_not_watch_is_red(metrics: str, period_s: float | None, says: str) -> None:
    assert says in (await monitoring_says(metrics, period_s) or "")
