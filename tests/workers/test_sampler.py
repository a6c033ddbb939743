"""Each row is sampled by its own parameters and noise; no row can feel another."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cluster.api.sampling import SamplingParams
from workers.noise import uniform
from workers.sampler import Sampler
from workers.step import SampleInput

VOCAB = 1000
EOS = 7


def sampler() -> Sampler:
    return Sampler(frozenset({EOS}))


def logits(seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * spread).astype(np.float32)


def one(
    position: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), choice: int = 0, **changes: Any
) -> SampleInput:
    params = SamplingParams(**{"max_tokens": 64, "seed": 1, **changes})
    return SampleInput(params, choice, position, prompt, output)


def draw(row: np.ndarray, **changes: Any) -> int:
    return sampler().sample(row, [one(**changes)])[0].token_id


def draws(row: np.ndarray, count: int = 4000, **changes: Any) -> np.ndarray:
    inputs = [one(position=position, **changes) for position in range(count)]
    return np.asarray([drawn.token_id for drawn in sampler().sample(row, inputs)])


def probabilities(row: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = np.exp((row.astype(np.float64) - row.max()) / temperature)
    return scaled / scaled.sum()


def test_greedy_takes_the_highest_and_the_lowest_id_among_equals() -> None:
    row = logits()
    assert draw(row, temperature=0.0) == int(row.argmax())
    row[[900, 30]] = 50.0
    assert draw(row, temperature=0.0) == 30


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(temperature: float) -> None:
    row = logits()[:20].copy()
    counts = np.bincount(draws(row, 20000, temperature=temperature), minlength=20) / 20000
    expected = probabilities(row, temperature)
    assert np.abs(counts - expected).max() < 4 * math.sqrt(0.25 / 20000)


def test_noise_depends_on_seed_choice_and_position_and_nothing_else() -> None:
    triples = [(seed, choice, position) for seed in (0, 1, 2**64 - 1) for choice in (0, 1) for position in (0, 1, 2)]
    assert len({uniform(*triple) for triple in triples}) == len(triples)
    assert all(uniform(*triple) == uniform(*triple) for triple in triples)
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_noise_is_uniform() -> None:
    values = np.asarray([uniform(5, 0, position) for position in range(20000)])
    assert 0.0 <= values.min() < values.max() < 1.0
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square with 19 degrees of freedom, p about 0.0007


def test_a_seeded_row_draws_the_same_alone_and_beside_any_neighbour() -> None:
    row, mine = logits(), one(seed=11, temperature=1.2, position=5)
    [alone] = sampler().sample(row, [mine])
    shared = sampler()
    for neighbour in (one(seed=99), one(seed=11, position=6), one(temperature=0.0), one(top_k=3, logprobs=5)):
        shared.sample(logits(3), [neighbour])
        assert shared.sample(row, [neighbour, mine])[1] == alone
        assert shared.sample(row, [mine, neighbour])[0] == alone


def test_each_row_obeys_its_own_parameters_in_any_order() -> None:
    """Three rows whose bias leaves one token each: every row must emit its own, however they are ordered."""
    own = {token: one(logit_bias=((token, 100.0),), temperature=1.0) for token in (11, 222, 333)}
    for order in ((11, 222, 333), (333, 11, 222), (222, 333, 11)):
        drawn = sampler().sample(logits(), [own[token] for token in order])
        assert [result.token_id for result in drawn] == list(order)


def test_the_first_token_obeys_the_request_too() -> None:
    assert draw(logits(), position=0, logit_bias=((5, 100.0),)) == 5


def test_logits_are_left_as_they_were() -> None:
    row = logits()
    before = row.copy()
    draw(row, logit_bias=((5, 100.0),), presence_penalty=1.0, output=(3,), min_tokens=4, top_p=0.5, logprobs=3)
    assert np.array_equal(row, before)


def test_top_k_leaves_exactly_k() -> None:
    row = logits()
    row[:4] = 30.0  # four equals on the border of three
    assert set(draws(row, top_k=3)) == {0, 1, 2}
    assert draw(row, top_k=1, seed=123) == 0


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_leaves_the_shortest_list_that_holds_the_mass(top_p: float) -> None:
    row = logits(spread=3.0)
    expected = probabilities(row)
    order = np.argsort(-expected, kind="stable")
    size = int(np.searchsorted(np.cumsum(expected[order]), top_p)) + 1
    seen = set(draws(row, top_p=top_p).tolist())
    assert seen <= set(order[:size].tolist())
    assert len(seen) > min(size, 40) / 2, "a sampler that always takes one token would pass"


def test_top_p_over_a_flat_distribution_looks_at_the_whole_vocabulary() -> None:
    seen = draws(np.zeros(VOCAB, dtype=np.float32), top_p=0.5)
    assert set(seen.tolist()) <= set(range(VOCAB // 2))
    assert len(set(seen.tolist())) > VOCAB // 3


def test_min_p_is_a_share_of_the_highest() -> None:
    row = logits()
    allowed = set(np.flatnonzero(probabilities(row) >= 0.2 * probabilities(row).max()).tolist())
    assert set(draws(row, min_p=0.2).tolist()) == allowed


def test_penalties_touch_what_they_name() -> None:
    row = np.zeros(VOCAB, dtype=np.float32)
    row[[1, 2, 3]] = [4.0, 3.9, 3.8]
    assert draw(row, temperature=0.0, presence_penalty=0.15, output=(1,)) == 2
    assert draw(row, temperature=0.0, presence_penalty=0.15, prompt=(1,)) == 1, "the prompt does not count here"
    assert draw(row, temperature=0.0, frequency_penalty=0.06, output=(1, 1, 1)) == 2
    assert draw(row, temperature=0.0, frequency_penalty=0.06, output=(1,)) == 1
    assert draw(row, temperature=0.0, repetition_penalty=1.1, prompt=(1,), output=(2,)) == 3
    negative = -1.0 - np.arange(VOCAB, dtype=np.float32)
    assert draw(negative, temperature=0.0, repetition_penalty=3.0, output=(0,)) == 1, "negative logits move down too"


def test_min_tokens_keeps_enders_away_until_then() -> None:
    row = logits()
    row[[EOS, 8]] = [60.0, 50.0]
    assert draw(row, temperature=0.0, min_tokens=3, position=2, stop_token_ids=(8,)) not in (EOS, 8)
    assert draw(row, temperature=0.0, min_tokens=3, position=3, stop_token_ids=(8,)) == EOS
    assert draw(row, temperature=0.0, min_tokens=3, position=2, ignore_eos=True) == EOS, "then it ends nothing"


def test_logprobs_are_the_models_own() -> None:
    row = logits()
    expected = np.log(probabilities(row))
    [drawn] = sampler().sample(row, [one(temperature=0.3, logit_bias=((5, 100.0),), logprobs=4)])
    assert drawn.token_id == 5
    assert drawn.logprob == pytest.approx(expected[5], abs=1e-5)
    assert [token for token, _ in drawn.top] == np.argsort(-expected, kind="stable")[:4].tolist()
    assert [value for _, value in drawn.top] == pytest.approx(np.sort(expected)[::-1][:4].tolist(), abs=1e-5)
    assert sampler().sample(row, [one(logprobs=0)])[0].top == ()
    assert sampler().sample(row, [one()])[0].logprob is None


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5.0])
def test_extreme_temperatures_draw_something_sensible(temperature: float) -> None:
    row = logits(spread=10.0)
    seen = set(draws(row, 500, temperature=temperature).tolist())
    assert (seen == {int(row.argmax())}) == (temperature < 1.0)
