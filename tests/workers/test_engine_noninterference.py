"""What an attacker can observe on the engine's step clock does not depend on what a victim said before.

Default mode: the victim is done before the attacker starts, nothing is evicted, and the two histories differ in
content only. Then the attacker's whole trace (steps, order, usage, tokens) must be equal, not merely similar.
"""

from __future__ import annotations

import pytest
from engine_builders import make_engine, make_request, template_spans

from cluster.api.output import RequestOutput
from workers.build import EngineParts

SECRET_PROMPT = list(range(100, 130))
OTHER_PROMPT = list(range(300, 330))


def attackers_trace(history: list[int], *, attacker: str, guess: list[int]) -> list[list[RequestOutput]]:
    """Outputs per step. The victim, alice, ran `history` before; the attacker then tries a guess of it."""
    engine = make_engine(parts=EngineParts(clock=lambda: 1.0), num_blocks=200)
    engine.add_request(make_request(history, 8, user="alice", request_id="victim"))
    while engine.has_work:
        engine.step()
    for index, prompt in enumerate((guess, [*guess[:8], 5], list(range(40)))):
        engine.add_request(make_request(prompt, 6, user=attacker, request_id=f"attack-{index}"))
    trace = []
    while engine.has_work:
        trace.append(engine.step())
    return trace


@pytest.mark.parametrize("guess", [SECRET_PROMPT, OTHER_PROMPT], ids=["right", "wrong"])
def test_a_guess_learns_nothing_from_another_users_history(guess: list[int]) -> None:
    traces = [attackers_trace(history, attacker="bob", guess=guess) for history in (SECRET_PROMPT, OTHER_PROMPT)]
    assert traces[0] == traces[1]


def test_the_same_user_does_see_the_difference() -> None:
    """The positive control: with reuse allowed, the trace tells the two histories apart."""
    traces = [
        attackers_trace(history, attacker="alice", guess=SECRET_PROMPT) for history in (SECRET_PROMPT, OTHER_PROMPT)
    ]
    assert traces[0] != traces[1]


@pytest.mark.parametrize("is_warmed", [True, False])
def test_whether_a_template_hits_does_not_depend_on_other_users(is_warmed: bool) -> None:
    def trace(has_victim: bool) -> list[list[RequestOutput]]:
        engine = make_engine(parts=EngineParts(clock=lambda: 1.0), num_blocks=200)
        if is_warmed:
            warm_up = make_request(SECRET_PROMPT, 1, user="operator", spans=template_spans(5, "acme", "operator"))
            engine.add_request(warm_up, is_warm_up=True)
        if has_victim:
            engine.add_request(make_request(SECRET_PROMPT, 4, spans=template_spans(5, "acme", "alice")))
        while engine.has_work:
            engine.step()
        spans = template_spans(5, "acme", "bob")
        engine.add_request(make_request(SECRET_PROMPT, 4, user="bob", spans=spans, request_id="attack"))
        steps = []
        while engine.has_work:
            steps.append(engine.step())
        assert steps[0][0].num_cached_tokens == (20 if is_warmed else 0)
        return steps

    assert trace(has_victim=True) == trace(has_victim=False)
