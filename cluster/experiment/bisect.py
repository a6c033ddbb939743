"""Switches one thing at a time and runs the recorded arrivals again: what makes the contamination go away?

A replay under the exactness oracle is decisive, because a clean engine gives the same bits under every setting. Where
only statistics are to be had, a switch clears nothing before enough clean rounds for the rate that was seen.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from cluster.experiment.component import Component
from cluster.experiment.runner import ExperimentResult
from cluster.experiment.statistics import rounds_needed
from workers.config import Batching, EngineConfig, Layout


class Outcome(Enum):
    CLEARED = "cleared"
    STILL = "still contaminated"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Switch:
    """One engine setting turned away from the baseline."""

    name: str
    change: Callable[[EngineConfig], EngineConfig]


PREFIX_CACHE = "prefix cache off"
BATCHING = "continuous batching off"
LAYOUT = "other layout"
ALONE = "one sequence at a time"
PRESSURE = "pool pressure off"


def switches(num_blocks_roomy: int | None = None) -> tuple[Switch, ...]:
    """In the order in which they are tried. Pressure can be taken off only where a roomy pool's size is known."""
    order = [
        Switch(PREFIX_CACHE, lambda config: replace(config, prefix_caching=False)),
        Switch(BATCHING, lambda config: replace(config, batching=Batching.STATIC)),
        Switch(LAYOUT, _other_layout),
        Switch(ALONE, lambda config: replace(config, max_num_seqs=1)),
    ]
    if num_blocks_roomy is not None:
        roomy = num_blocks_roomy
        order.append(Switch(PRESSURE, lambda config: replace(config, num_blocks=max(roomy, config.num_blocks))))
    return tuple(order)


def _other_layout(config: EngineConfig) -> EngineConfig:
    other = Layout.PADDED if config.layout is Layout.PACKED else Layout.PACKED
    return replace(config, layout=other)


@dataclass(frozen=True, slots=True)
class Trial:
    """A replay with these switches turned."""

    switches: tuple[str, ...]
    outcome: Outcome
    num_rounds: int
    num_contaminated: int


@dataclass(frozen=True, slots=True)
class Bisection:
    """All replays, and the component that they and the findings name; None is undecided."""

    trials: tuple[Trial, ...]
    named: Component | None


RunWith = Callable[[EngineConfig], Awaitable[ExperimentResult]]


async def bisect(
    config: EngineConfig, order: Sequence[Switch], run_with: RunWith, *, seen_rate: float, is_replay_exact: bool
) -> list[Trial]:
    """One switch at a time; when none alone clears it, one after the other without turning any back."""
    trials = []
    for switch in order:
        trials.append(await _try(config, (switch,), run_with, seen_rate, is_replay_exact))
    if any(trial.outcome is not Outcome.STILL for trial in trials):
        return trials
    for count in range(2, len(order) + 1):
        trials.append(await _try(config, tuple(order[:count]), run_with, seen_rate, is_replay_exact))
        if trials[-1].outcome is not Outcome.STILL:
            break
    return trials


async def _try(
    config: EngineConfig, turned: Sequence[Switch], run_with: RunWith, seen_rate: float, is_replay_exact: bool
) -> Trial:
    for switch in turned:
        config = switch.change(config)
    result = await run_with(config)
    num_rounds = len(result.rounds)
    num_contaminated = sum(item.is_contaminated for item in result.rounds)
    if num_contaminated:
        outcome = Outcome.STILL
    elif is_replay_exact or num_rounds >= rounds_needed(seen_rate):
        outcome = Outcome.CLEARED
    else:
        outcome = Outcome.UNDECIDED
    return Trial(tuple(switch.name for switch in turned), outcome, num_rounds, num_contaminated)


def cleared_by(trials: Sequence[Trial]) -> frozenset[str]:
    """Switches that clear it alone."""
    return frozenset(
        trial.switches[0] for trial in trials if len(trial.switches) == 1 and trial.outcome is Outcome.CLEARED
    )
