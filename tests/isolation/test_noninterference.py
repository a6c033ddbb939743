"""What an attacker sees through the whole serving path does not depend on what a victim said.

On the engine's step clock, in default mode: the victim is done before the attacker starts, nothing is evicted, and the
two histories differ in content only. Steps, order, finish reasons, usage, tokens, logprobs and error texts are equal.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.experiment.observation import Observation
from cluster.experiment.plan import PlannedRequest, Round
from cluster.experiment.targets.embedded import EmbeddedTarget
from cluster.experiment.targets.weights import LoadedModel
from workers.config import EngineConfig

CONFIG = EngineConfig(num_blocks=512, max_model_len=1024)
SECRET = "the treasure lies under the third oak behind the mill, dig at night and tell no one of it"
OTHER = "our bakery opens at seven on working days, at eight on sundays, and is closed on mondays."
GUESSES = (SECRET, SECRET[:40], OTHER, "something else entirely")


def ask(name: str, user: str, text: str, arrival_step: int = 0, **changes: object) -> PlannedRequest:
    request = PlannedRequest(name, "A", user, "", "en", (("user", text),), 12, arrival_step)
    return replace(request, **changes)


async def attackers_trace(loaded: LoadedModel, victim_said: str, attacker: str) -> list[Observation]:
    target = EmbeddedTarget(loaded, CONFIG)
    victims = tuple(ask(f"v{index}", "victim", victim_said, index) for index in range(3))
    await target.run_round(Round(0, victims))
    probes = [ask(f"a{index}", attacker, guess, index) for index, guess in enumerate(GUESSES)]
    probes.append(ask("too long", attacker, "x" * 2000))
    seen = await target.run_round(Round(1, tuple(probes)))
    assert not seen.num_evictions
    return [seen.by_name[probe.name] for probe in probes]


async def test_attackers_trace_is_equal_under_both_histories(tiny: LoadedModel) -> None:
    assert len(SECRET) == len(OTHER)
    first = await attackers_trace(tiny, SECRET, "attacker")
    second = await attackers_trace(tiny, OTHER, "attacker")
    assert first == second


async def test_the_victim_herself_would_see_the_difference(tiny: LoadedModel) -> None:
    """The positive control: the same comparison with the victim's own user does tell the histories apart."""
    first = await attackers_trace(tiny, SECRET, "victim")
    second = await attackers_trace(tiny, OTHER, "victim")
    assert first[0].num_cached_tokens
    assert not second[0].num_cached_tokens
    assert first != second


@pytest.mark.parametrize("field", ["text", "num_cached_tokens", "token_steps", "engine_tokens", "error"])
async def test_every_channel_that_is_compared_holds_something(tiny: LoadedModel, field: str) -> None:
    trace = await attackers_trace(tiny, SECRET, "attacker")
    assert any(getattr(seen, field) not in (None, "", ()) for seen in trace)
