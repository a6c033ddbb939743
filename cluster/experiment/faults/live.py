"""Planted faults for a live worker: only those that change the engine, since nothing else of them runs there."""

from __future__ import annotations

from cluster.api.errors import InvalidRequestError
from cluster.experiment.faults.catalog import planted_faults
from cluster.experiment.targets.stack import StackParts


def engine_parts(name: str) -> StackParts:
    """Raises PermissionDeniedError while the gate is shut, InvalidRequestError for a fault outside the engine."""
    (fault,) = planted_faults(name)
    parts, real = fault.make_parts(), StackParts()
    has_front_part = (parts.token_table, parts.mailboxes, parts.core) != (real.token_table, real.mailboxes, real.core)
    if has_front_part:
        raise InvalidRequestError(f"the fault {name!r} is in the front door, not in a worker", param="planted_fault")
    return parts
