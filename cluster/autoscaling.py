"""How many workers are needed: Serve's autoscaler asks. Its own measure, requests through Serve, sees no tokens here.

Runs in Serve's controller, which gets this module by value: standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

OCCUPANCY = "occupancy"  # of a worker: its requests per sequence slot; above 1 some wait
TARGET_OCCUPANCY = 0.7


class ScalingContext(Protocol):
    """The part of ray.serve.config.AutoscalingContext that is read; replica id -> mean over Serve's look-back."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


def workers_needed(context: ScalingContext) -> tuple[float, dict[str, Any]]:
    """Workers with which each would be occupied to the target. Serve keeps it within bounds and waits its delays.

    The router's queue is no part of it: while requests wait there, every worker reports more than its slots.
    """
    occupancies = (context.aggregated_metrics or {}).get(OCCUPANCY, {})
    return sum(occupancies.values()) / TARGET_OCCUPANCY, {}
