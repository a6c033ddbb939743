"""The numbers behind a verdict, against values from textbooks and closed forms."""

from __future__ import annotations

import math
import runpy
import sys

import numpy as np
import pytest

from cluster.api.errors import UnsupportedError
from cluster.experiment import statistics
from cluster.experiment.statistics import (
    clopper_pearson,
    kolmogorov_smirnov,
    rate,
    rounds_needed,
    rule_of_three,
    smallest_detectable_shift,
)


def test_interval_of_zero_hits_has_its_closed_form() -> None:
    low, high = clopper_pearson(0, 50)
    assert low == 0
    assert high == pytest.approx(1 - 0.025 ** (1 / 50))


def test_interval_is_symmetric_and_holds_the_rate() -> None:
    low, high = clopper_pearson(6, 100)
    assert low < 0.06 < high
    mirrored = clopper_pearson(94, 100)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high))


def test_nothing_is_known_of_no_trials() -> None:
    assert clopper_pearson(0, 0) == (0.0, 1.0)
    assert rule_of_three(0) == 1.0


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 hits of 2 trials"):
        rate(3, 2)


@pytest.mark.parametrize(("seen", "needed"), [(0.06, 49), (0.5, 5), (1.0, 1), (0.01, 299)])
def test_rounds_needed_to_clear_a_component(seen: float, needed: int) -> None:
    assert rounds_needed(seen) == needed
    if seen < 1:
        assert (1 - seen) ** needed <= 0.05 < (1 - seen) ** (needed - 1)


def test_kolmogorov_smirnov_rejects_a_shift_and_not_noise() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(2, 250))
    assert not kolmogorov_smirnov(list(first), list(second), alpha=0.01).rejects
    assert kolmogorov_smirnov(list(first), list(second + 1), alpha=0.01).rejects


def test_smallest_detectable_shift_is_where_rejection_begins() -> None:
    sample = np.random.default_rng(2).normal(size=250)
    shift = smallest_detectable_shift(list(sample), alpha=0.01)
    assert 0.05 < shift < 0.5
    assert kolmogorov_smirnov(list(sample), list(sample + shift * 1.01), alpha=0.01).rejects
    assert not kolmogorov_smirnov(list(sample), list(sample + shift * 0.9), alpha=0.01).rejects


def test_a_tiny_sample_can_show_no_shift() -> None:
    assert math.isinf(smallest_detectable_shift([1.0, 2.0, 3.0], alpha=0.01))


def test_without_scipy_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UnsupportedError, match=r"scipy: pip install 'watchword\[experiments\]'"):
        runpy.run_path(statistics.__file__)
