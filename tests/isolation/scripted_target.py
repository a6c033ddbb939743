"""A target whose answers are written by the test: the fake behind the Target seam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.experiment.observation import Observation, RoundObservation, Violation
from cluster.experiment.plan import PlannedRequest, Round
from cluster.experiment.targets.target import ReuseControl, TargetInfo


def obedient(request: PlannedRequest, planned: Round) -> Observation:
    return Observation(request.name, text=f"{request.marker}. It is Paris.", finish_reason="stop")


def leaky(request: PlannedRequest, planned: Round) -> Observation:
    """In every third round B answers with A's marker as well."""
    first = planned.marked[0]
    leak = f" {first.marker.lower()}" if request.role == "B" and planned.index % 3 == 0 else ""
    return Observation(request.name, text=f"{request.marker}.{leak}", finish_reason="stop")


def silent(request: PlannedRequest, planned: Round) -> Observation:
    return Observation(request.name, text="It is Paris.", finish_reason="stop")


@dataclass
class ScriptedTarget:
    answer: Callable[[PlannedRequest, Round], Observation] = obedient
    shared: Callable[[int], bool | None] = lambda index: True
    reuse: ReuseControl = field(default_factory=lambda: ReuseControl(32, expected=True))
    num_evictions: int = 0
    violations: tuple[Violation, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def info(self) -> TargetInfo:
        return TargetInfo("scripted", "none", sees_steps=True, settings={})

    async def run_round(self, planned: Round) -> RoundObservation:
        by_name = {request.name: self.answer(request, planned) for request in planned.requests}
        return RoundObservation(
            planned.index,
            by_name,
            shared_step=self.shared(planned.index),
            num_evictions=self.num_evictions,
            num_preemptions=0,
            violations=self.violations,
            counters=self.counters,
        )

    async def reuse_control(self) -> ReuseControl:
        return self.reuse

    async def close(self) -> None: ...
