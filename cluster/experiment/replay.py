"""Where a plan comes from: a seed, or a recording of an earlier run."""

from __future__ import annotations

import secrets
from pathlib import Path

from cluster.api.errors import InvalidRequestError
from cluster.experiment.plan import Plan


def draw_seed() -> int:
    return secrets.randbits(32)


def write_plan(path: Path, plan: Plan) -> None:
    path.write_text(plan.to_json(), encoding="utf-8")


def read_plan(path: Path) -> Plan:
    """Raises InvalidRequestError when the file cannot be read as a plan."""
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"{path} holds no recorded plan: {error}", param="replay") from None
