import asyncio
from typing import Any

from cluster.bench.compare import Comparison, Contestant, compare, markdown

RIVALS = ["fast", "slow"]


def _summary(tokens_per_s: float, ttft_ms: float) -> dict[str, Any]:
    return {
        "output_tokens_per_s": tokens_per_s,
        "ttft_p50_ms": ttft_ms,
        "ttft_p95_ms": 2 * ttft_ms,
        "itl_p50_ms": 20.0,
        "cached_tokens": 0,
        "errors": 0,
    }


def test_ours_is_held_against_the_best_rival() -> None:
    rounds = {"watchword": [_summary(150, 70)], "fast": [_summary(100, 100)], "slow": [_summary(50, 90)]}
    text = markdown([Comparison("B", rounds)], ["watchword"], RIVALS)
    assert "output tokens/s × 1.50, TTFT p50 × 0.78." in text


def test_a_way_that_only_one_workload_knows_is_left_out_of_the_others() -> None:
    rivals = {"fast": [_summary(100, 100)], "slow": [_summary(50, 90)]}
    comparisons = [
        Comparison("A", {"watchword, one user": [_summary(200, 50)], **rivals}),
        Comparison("B", {"watchword": [_summary(150, 70)], **rivals}),
    ]
    text = markdown(comparisons, ["watchword", "watchword, one user"], RIVALS)
    assert text.count("against the best of the others") == 2


def test_every_contestant_runs_once_a_round_and_none_always_follows_the_same() -> None:
    calls: list[str] = []

    async def run_once(contestant: Contestant, _workload: str, _seed: str) -> dict[str, Any]:
        calls.append(contestant.name)
        return _summary(1, 1)

    contestants = [Contestant(name, "http://127.0.0.1:1/v1") for name in ("watchword", *RIVALS)]
    done = asyncio.run(compare("B", contestants, 3, "seed", run_once))
    assert calls == ["watchword", "fast", "slow", "fast", "slow", "watchword", "slow", "watchword", "fast"]
    assert {name: len(rounds) for name, rounds in done.rounds.items()} == {"watchword": 3, "fast": 3, "slow": 3}
