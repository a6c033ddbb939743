"""What a count of contaminated requests does and does not prove. The only file of the experiment that needs scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.api.errors import UnsupportedError

try:
    from scipy import stats
except ModuleNotFoundError:
    raise UnsupportedError("the experiment's statistics need scipy: pip install 'watchword[experiments]'") from None

Sample = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rate:
    """`hits` of `trials`, with the exact (Clopper-Pearson) two-sided 95 % interval."""

    hits: int
    trials: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.hits / self.trials if self.trials else 0.0

    def __str__(self) -> str:
        return f"{self.hits}/{self.trials} = {self.value:.2%} (95 %: {self.low:.2%} to {self.high:.2%})"


def rate(hits: int, trials: int) -> Rate:
    """Raises ValueError unless 0 ≤ hits ≤ trials."""
    if not 0 <= hits <= trials:
        raise ValueError(f"{hits} hits of {trials} trials, wanted 0 ≤ hits ≤ trials")
    low, high = clopper_pearson(hits, trials)
    return Rate(hits, trials, low, high)


def clopper_pearson(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact binomial interval. Of no trials nothing is known: (0, 1)."""
    if trials == 0:
        return 0.0, 1.0
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(stats.beta.ppf(tail, hits, trials - hits + 1))
    high = 1.0 if hits == trials else float(stats.beta.ppf(1 - tail, hits + 1, trials - hits))
    return low, high


def rule_of_three(trials: int) -> float:
    """0 of n supports only "rate < 3/n" at 95 %."""
    return min(1.0, 3 / trials) if trials else 1.0


def rounds_needed(seen_rate: float, miss_probability: float = 0.05) -> int:
    """Clean rounds after which a component of this contamination rate is cleared: ln 0.05 / ln(1 - rate)."""
    if not 0 < seen_rate <= 1:
        raise ValueError(f"rate {seen_rate}, wanted a number in (0, 1]")
    if seen_rate == 1:
        return 1
    return math.ceil(math.log(miss_probability) / math.log1p(-seen_rate))


@dataclass(frozen=True, slots=True)
class TwoSample:
    """Two-sample Kolmogorov-Smirnov test: `statistic` is the largest gap between the two distribution functions."""

    statistic: float
    p_value: float
    alpha: float

    @property
    def rejects(self) -> bool:
        return self.p_value < self.alpha


def kolmogorov_smirnov(first: Sample, second: Sample, alpha: float) -> TwoSample:
    result = stats.ks_2samp(first, second)
    return TwoSample(float(result.statistic), float(result.pvalue), alpha)


def smallest_detectable_shift(sample: Sample, alpha: float, resolution: int = 60) -> float:
    """Smallest constant delay that the test would see if it were added to `sample` (same unit as the sample).

    Found by bisection on the sample itself, so that its real spread counts; infinite when even a shift beyond the
    whole range would not reject at this size.
    """
    values = np.asarray(sample, dtype=float)
    low, high = 0.0, 2 * float(np.ptp(values)) + 1e-9
    if not kolmogorov_smirnov(values, values + high, alpha).rejects:
        return math.inf
    for _ in range(resolution):
        middle = (low + high) / 2
        if kolmogorov_smirnov(values, values + middle, alpha).rejects:
            high = middle
        else:
            low = middle
    return high
