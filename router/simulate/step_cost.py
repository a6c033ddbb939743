"""How long one engine step takes, as a straight line through measured steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np


class StepSample(NamedTuple):
    """One measured step: prompt tokens computed in it, sequences that decoded in it, seconds it took."""

    num_prefill_tokens: int
    num_decoding: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """duration = base + prefill tokens × prefill_token_s + decoding sequences × decode_seq_s."""

    base_s: float
    prefill_token_s: float
    decode_seq_s: float

    def __post_init__(self) -> None:
        if self.base_s < 0 or self.decode_seq_s < 0 or not self.prefill_token_s > 0:
            raise ValueError(f"{self} has a negative part, or prefill that takes no time")

    def duration_s(self, num_prefill_tokens: float, num_decoding: int) -> float:
        return self.base_s + num_prefill_tokens * self.prefill_token_s + num_decoding * self.decode_seq_s

    def at_rate(self, prefill_tokens_per_s: float, token_budget: int) -> StepCost:
        """The same proportions on a machine that prefills at this rate, in steps of `token_budget` tokens."""
        factor = token_budget / prefill_tokens_per_s / self.duration_s(token_budget, 0)
        return StepCost(self.base_s * factor, self.prefill_token_s * factor, self.decode_seq_s * factor)


def fit_step_cost(samples: Sequence[StepSample]) -> StepCost:
    """Least squares, relative to each step's duration so that short steps count as much; negative parts become 0."""
    if len(samples) < 3:
        raise ValueError(f"{len(samples)} samples of steps, needed are at least 3 different ones")
    rows = np.array([[1.0, s.num_prefill_tokens, s.num_decoding] for s in samples])
    durations = np.array([s.duration_s for s in samples])
    weighted = rows / durations[:, None]
    kept = [0, 1, 2]
    while True:
        parts = np.linalg.lstsq(weighted[:, kept], np.ones(len(samples)), rcond=None)[0]
        if (parts >= 0).all():
            break
        kept.remove(kept[int(parts.argmin())])
    values = dict(zip(kept, parts.tolist(), strict=True))
    return StepCost(values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0))


def load_step_samples(path: Path) -> list[StepSample]:
    """JSON Lines of [prefill tokens, decoding sequences, seconds]."""
    with path.open(encoding="utf-8") as file:
        return [StepSample(*json.loads(line)) for line in file if line.strip()]
