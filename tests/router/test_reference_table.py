"""The simulator against an independent replay of the Mooncake conversation trace, and our policy against the oracle."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from router.policies.catalog import POLICIES
from router.simulate.config import SimulationConfig
from router.simulate.loaders import load_trace
from router.simulate.result import PolicyResult
from router.simulate.run import run_simulation

SHARED = Path(os.environ.get("WATCHWORD_SHARED", Path(__file__).resolve().parents[3] / "shared"))
TRACE = SHARED / "traces" / "mooncake_conversation.jsonl"

# TTFT mean, p90, p99 in seconds, hit rate: 8 workers, serial prefill at 6,000 tokens/s, 4,000 blocks each.
REFERENCE = {
    1.0: {
        "random": (10.8, 27.3, 54.4, 0.098),
        "round_robin": (7.1, 17.9, 35.0, 0.097),
        "power_of_two": (5.6, 13.7, 24.5, 0.095),
        "least_requests": (5.1, 12.5, 24.2, 0.094),
        "least_tokens": (2.5, 5.8, 14.6, 0.095),
        "ray_prefix": (3.4, 9.9, 22.6, 0.330),
        "sglang": (3.3, 8.7, 19.8, 0.325),
        "aibrix": (3.5, 9.1, 20.2, 0.282),
        "llm_d": (3.2, 8.5, 19.9, 0.314),
        "dynamo": (2.7, 5.9, 14.1, 0.221),
        "dynamo_prefill": (1.8, 4.3, 13.0, 0.250),
        "lmetric": (1.8, 4.3, 14.2, 0.245),
        "oracle": (1.6, 3.9, 12.6, 0.285),
    },
    1.25: {
        "random": (42.5, 96.2, 142.9),
        "round_robin": (23.8, 51.0, 72.5),
        "power_of_two": (13.2, 27.3, 44.4),
        "least_requests": (12.0, 24.9, 43.3),
        "least_tokens": (7.4, 16.6, 24.5),
        "ray_prefix": (4.9, 13.9, 31.0),
        "sglang": (4.4, 11.3, 23.6),
        "aibrix": (4.9, 12.5, 23.9),
        "llm_d": (4.4, 11.1, 22.7),
        "dynamo": (4.3, 9.0, 16.5),
        "dynamo_prefill": (2.6, 6.2, 14.0),
        "lmetric": (2.4, 5.8, 17.2),
        "oracle": (2.1, 5.0, 13.2),
    },
}

pytestmark = [
    pytest.mark.shared,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not TRACE.exists(), reason=f"the trace is not at {TRACE}"),
]


@pytest.fixture(scope="module", params=sorted(REFERENCE))
def replay(request: pytest.FixtureRequest) -> tuple[float, dict[str, PolicyResult], float]:
    """(load, results, CPU seconds)."""
    trace = load_trace(TRACE)
    started = time.process_time()
    results = run_simulation(trace, SimulationConfig(), policies=list(POLICIES), load=request.param)
    return request.param, results, time.process_time() - started


def test_rivals_reproduce_the_reference_within_15_percent(
    replay: tuple[float, dict[str, PolicyResult], float],
) -> None:
    load, results, _ = replay
    for name, expected in REFERENCE[load].items():
        result = results[name]
        values = (result.ttft_mean_s, result.ttft_p90_s, result.ttft_p99_s, result.hit_rate)
        assert values[: len(expected)] == pytest.approx(expected, rel=0.15), name


def test_watchword_beats_every_policy_in_mean_and_p90(replay: tuple[float, dict[str, PolicyResult], float]) -> None:
    _, results, _ = replay
    ours = results.pop("watchword")
    assert ours.ttft_mean_s < min(result.ttft_mean_s for result in results.values())
    assert ours.ttft_p90_s < min(result.ttft_p90_s for result in results.values())


def test_all_policies_on_the_whole_trace_take_less_than_a_minute(
    replay: tuple[float, dict[str, PolicyResult], float],
) -> None:
    assert replay[2] < 60.0
