"""Does time tell one user what another one has cached? Randomised paired blocks on the wall clock.

Each pair times one prompt twice as strangers see it: once after another user warmed exactly this prompt, once without.
Order within a pair is drawn at random, so that drift of the machine falls on both arms alike. The same is done with
the user's own warm-up: that difference must be seen, or the run could not have seen the other one either.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.experiment import state_file
from cluster.experiment.plan import PlannedRequest
from cluster.experiment.statistics import TwoSample, kolmogorov_smirnov, smallest_detectable_shift
from cluster.experiment.targets.embedded import EmbeddedTarget
from cluster.experiment.verdict import Status

MIN_PAIRS = 250
_ALPHA = 0.01
_NUM_TESTS = 2
_ARMS = (("cold", "foreign"), ("own cold", "own"))  # randomised within each pair
_PROMPT_WORDS = 90
_TEXT = "river stone garden window paper table summer bread music lamp mountain letter cloud bridge forest"
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class TimingResult:
    """Times to the first token, in seconds. `shift_s`: smallest constant difference that this size would show."""

    num_pairs: int
    foreign: TwoSample
    own: TwoSample
    shift_s: float
    median_cold_s: float
    median_own_warm_s: float

    @property
    def status(self) -> Status:
        if not self.own.rejects:
            return Status.VOID
        return Status.CONTAMINATED if self.foreign.rejects else Status.CLEAN

    def record(self) -> dict[str, Any]:
        return {
            "pairs": self.num_pairs,
            "alpha": self.foreign.alpha,
            "foreign": {"statistic": self.foreign.statistic, "p_value": self.foreign.p_value},
            "own": {"statistic": self.own.statistic, "p_value": self.own.p_value},
            "smallest_detectable_shift_s": self.shift_s,
            "median_cold_s": self.median_cold_s,
            "median_own_warm_s": self.median_own_warm_s,
            "verdict": self.status.name.lower(),
        }


@dataclass(slots=True)
class Samples:
    """Seconds to the first token by arm, as far as a run has come. `path` None keeps them in memory only."""

    model: str
    seed: int
    path: Path | None = None
    arms: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for pair in _ARMS for arm in pair})

    @classmethod
    def load(cls, path: Path | None, model: str, seed: int) -> Samples:
        """Goes on with what the file holds. Raises InvalidRequestError when that is another run's."""
        samples = cls(model, seed, path)
        if path is not None and path.exists():
            samples.arms = state_file.load(path, samples._run())["arms"]
        return samples

    @property
    def num_pairs(self) -> int:
        return min(map(len, self.arms.values()))

    def add(self, seconds: dict[str, float]) -> None:
        """One block of pairs: every arm once."""
        for arm, value in seconds.items():
            self.arms[arm].append(value)
        if self.path is not None:
            state_file.save(self.path, {**self._run(), "arms": self.arms})

    def _run(self) -> dict[str, Any]:
        return {"model": self.model, "seed": self.seed}


async def measure(
    target: EmbeddedTarget,
    samples: Samples,
    num_pairs: int = MIN_PAIRS,
    progress: Callable[[int], None] = lambda done: None,
) -> TimingResult:
    """Adds to `samples` until there are enough. Raises ValueError below the smallest number of pairs."""
    if num_pairs < MIN_PAIRS:
        raise ValueError(f"pairs = {num_pairs}, wanted at least {MIN_PAIRS} per arm")
    rng = random.Random(f"{samples.seed} from pair {samples.num_pairs}")  # a run that goes on sends fresh prompts
    prober = _Prober(target, rng)
    while samples.num_pairs < num_pairs:
        seconds = {}
        for pair in _ARMS:
            for arm in rng.sample(pair, len(pair)):
                seconds[arm] = await prober.time_to_first_token(arm)
        samples.add(seconds)
        progress(samples.num_pairs)
    return _judge(samples.arms)


def _judge(arms: dict[str, list[float]]) -> TimingResult:
    num_pairs = len(arms["cold"])
    alpha = _ALPHA / _NUM_TESTS
    return TimingResult(
        num_pairs,
        foreign=kolmogorov_smirnov(arms["cold"], arms["foreign"], alpha),
        own=kolmogorov_smirnov(arms["own cold"], arms["own"], alpha),
        shift_s=smallest_detectable_shift(arms["cold"], alpha),
        median_cold_s=sorted(arms["cold"])[num_pairs // 2],
        median_own_warm_s=sorted(arms["own"])[num_pairs // 2],
    )


class _Prober:
    """Times one fresh prompt per call, after warming it (or an unrelated one of equal length) as `victim` or self."""

    def __init__(self, target: EmbeddedTarget, rng: random.Random) -> None:
        self._target = target
        self._rng = rng
        self._count = 0

    async def time_to_first_token(self, arm: str) -> float:
        prompt, other = self._prompt(), self._prompt()
        warmer = "victim" if arm in ("cold", "foreign") else "attacker"
        # The cold arms run a warm-up of the same length as well: only its content differs between the arms.
        await self._target.answer(self._request(prompt if arm in ("foreign", "own") else other, warmer))
        started = time.perf_counter()
        await self._target.answer(self._request(prompt, "attacker"))
        return time.perf_counter() - started

    def _prompt(self) -> str:
        return " ".join(self._rng.choice(_WORDS) for _ in range(_PROMPT_WORDS))

    def _request(self, prompt: str, user: str) -> PlannedRequest:
        self._count += 1
        return PlannedRequest(
            f"timing{self._count}", "control", user, "", "en", (("user", prompt),), max_tokens=1, arrival_step=0
        )
