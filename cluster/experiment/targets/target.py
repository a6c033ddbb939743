"""The seam between the experiment and whatever answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.experiment.observation import RoundObservation
from cluster.experiment.plan import Round


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """`sees_steps`: the engine itself confirms which requests shared a step. Otherwise only overlap in time is seen."""

    name: str
    model: str
    sees_steps: bool
    settings: dict[str, str]


@dataclass(frozen=True, slots=True)
class ReuseControl:
    """The pair that keeps every "nothing was shared" honest: the same prompt again, as the same user, must hit."""

    num_cached_tokens: int | None  # None: the server does not say
    expected: bool  # False when the prefix cache is switched off

    @property
    def failed(self) -> bool:
        return self.expected and self.num_cached_tokens == 0


class Target(Protocol):
    @property
    def info(self) -> TargetInfo: ...

    async def run_round(self, planned: Round) -> RoundObservation:
        """Sends the requests of one round in their order of arrival and waits for all of them.

        A failed request is an observation with `error`, not an exception: error texts are searched too.
        """
        ...

    async def reuse_control(self) -> ReuseControl: ...

    async def close(self) -> None: ...
