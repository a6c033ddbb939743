"""What a planted fault is: a name, the component that it breaks, and the collaborators that it replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.experiment.component import Component
from cluster.experiment.targets.stack import StackParts


@dataclass(frozen=True, slots=True)
class Fault:
    """`make_parts` is called once per engine life, so that a fault's own state never outlives its engine."""

    name: str
    component: Component
    what: str  # one line for reports
    make_parts: Callable[[], StackParts]
