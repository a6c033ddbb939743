"""The exactness oracle tells the layers apart: logits, choice, length, delivery, text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.experiment.observation import Observation, TokenTrace
from cluster.experiment.oracles import compare_with_solo

TOP = ((5, -0.1), (9, -2.5))
TOKENS = (TokenTrace(5, -0.1, TOP), TokenTrace(7, -0.2, ((7, -0.2),)))
SOLO = Observation("r0.A", text="ab", finish_reason="length", tokens=TOKENS, engine_tokens=TOKENS)


def test_equal_runs_have_no_finding() -> None:
    assert compare_with_solo(0, "r0.A", SOLO, SOLO) is None


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"engine_tokens": (TokenTrace(5, -0.1, ((5, -0.1), (9, -2.5000001))), TOKENS[1])}, "logits"),
        ({"engine_tokens": (TokenTrace(5, -0.10000001, TOP), TOKENS[1])}, "logits"),
        ({"engine_tokens": (TokenTrace(9, -2.5, TOP), TOKENS[1])}, "choice"),
        ({"engine_tokens": TOKENS[:1]}, "length"),
        ({"finish_reason": "stop"}, "length"),
        ({"tokens": TOKENS[:1]}, "delivery"),
        ({"text": "aB"}, "text"),
        ({"text": "X", "engine_tokens": TOKENS[:1], "finish_reason": "stop"}, "text"),  # a wrong text met a stop string
        ({"text": "a\ufffd", "engine_tokens": TOKENS[:1]}, "length"),  # cut within a character
        ({"error": "internal"}, "error"),
    ],
)
def test_first_difference_names_the_layer(changes: dict[str, object], kind: str) -> None:
    if "engine_tokens" in changes:  # what the engine made is what was delivered, unless delivery is the fault
        changes = {"tokens": changes["engine_tokens"], **changes}
    finding = compare_with_solo(0, "r0.A", replace(SOLO, **changes), SOLO)
    assert finding is not None
    assert finding.kind == kind


def test_an_aborted_request_is_compared_as_far_as_it_came() -> None:
    cut = replace(SOLO, was_aborted=True, engine_tokens=TOKENS[:1], tokens=TOKENS[:1], text="a", finish_reason=None)
    assert compare_with_solo(0, "r0.A", cut, SOLO) is None
    other = replace(cut, engine_tokens=(TokenTrace(6, -0.1, TOP),))
    assert compare_with_solo(0, "r0.A", other, SOLO) is not None
