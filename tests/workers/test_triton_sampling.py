"""Draws on the device: the same sets and the same distribution as workers/sampler.py, and free of the other rows."""

from __future__ import annotations

from typing import Any

from triton_builders import DEVICE, require_triton

require_triton()

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from cluster.api.sampling import SamplingParams  # noqa: E402
from workers.cuda.sampling import draw_tokens, is_drawn_on_device, make_draws  # noqa: E402
from workers.sampler import Sampler  # noqa: E402
from workers.step import SampleInput  # noqa: E402

VOCAB = 37


def make_input(position: int = 0, seed: int = 1, **changes: Any) -> SampleInput:
    params = SamplingParams(**{"max_tokens": 64, "seed": seed, "temperature": 1.0, **changes})
    return SampleInput(params, 0, position, (1, 2), (3,))


def make_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2)) * 2


def draw(logits: torch.Tensor, wanted: list[tuple[int, SampleInput]]) -> list[int]:
    return draw_tokens(logits.to(DEVICE), make_draws(wanted, DEVICE)).tolist()


def test_greedy_takes_the_lowest_id_of_the_highest() -> None:
    logits = make_logits(3)
    logits[1, 11] = logits[1, 29] = 50.0
    tokens = draw(logits, [(row, make_input(temperature=0.0)) for row in range(3)])
    assert tokens == logits.argmax(-1).tolist()
    assert tokens[1] == 11


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"temperature": 3.0}], ids=str)
def test_without_filters_the_token_is_the_cpu_samplers(settings: dict) -> None:
    """Both invert the distribution in order of ids at the same noise."""
    logits = make_logits(1)
    inputs = [make_input(position, **settings) for position in range(20)]
    expected = [Sampler(frozenset()).sample(logits[0].numpy(), [one])[0].token_id for one in inputs]
    assert draw(logits, [(0, one) for one in inputs]) == expected
    assert len(set(expected)) > 3


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.7, "min_p": 0.05}],
    ids=str,
)
def test_filters_leave_the_cpu_samplers_tokens(settings: dict) -> None:
    logits = make_logits(1)
    inputs = [make_input(position, **settings) for position in range(30)]
    expected = {Sampler(frozenset()).sample(logits[0].numpy(), [one])[0].token_id for one in inputs}
    drawn = draw(logits, [(0, one) for one in inputs])
    assert set(drawn) == expected
    assert len(expected) < VOCAB
    shares = torch.softmax(logits[0], -1)[sorted(expected)]
    counts = np.asarray([drawn.count(token) for token in sorted(expected)])
    assert np.abs(counts / len(drawn) - (shares / shares.sum()).numpy()).max() < 0.2


def test_a_draw_does_not_feel_the_others() -> None:
    logits = make_logits(4)
    wanted = [(row, make_input(row, top_p=0.8, top_k=9)) for row in (2, 0, 3, 1)]
    together = draw(logits, wanted)
    assert [draw(logits, [one])[0] for one in wanted] == together
    poisoned = logits.clone()
    poisoned[0] = float("nan")
    without = [index for index, (row, _) in enumerate(wanted) if row != 0]
    assert draw(poisoned, [wanted[index] for index in without]) == [together[index] for index in without]


@pytest.mark.parametrize(
    "settings",
    [
        {"logprobs": 0}, {"logit_bias": ((1, 2.0),)}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5}, {"min_tokens": 5},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_kernel_does_not_do_goes_to_the_host(settings: dict) -> None:
    assert not is_drawn_on_device(make_input(**settings))
    assert is_drawn_on_device(make_input())
    assert is_drawn_on_device(make_input(position=5, min_tokens=5))
