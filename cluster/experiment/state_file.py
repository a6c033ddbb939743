"""JSON files that keep what a long run has done, so that it can be interrupted and go on later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.api.errors import InvalidRequestError


def save(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces the file in one go, so that an interruption never leaves half of it."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
    draft.replace(path)


def load(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Raises InvalidRequestError unless the file is of a run with the `wanted` fields: others cannot be compared."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        held = {name: record[name] for name in wanted}
    except (ValueError, KeyError, TypeError):
        raise InvalidRequestError(f"{path} holds no such run: it has no {', '.join(wanted)}", param="state") from None
    if held != dict(wanted):
        there, here = (", ".join(f"{name} {value}" for name, value in one.items()) for one in (held, wanted))
        raise InvalidRequestError(f"{path} holds a run with {there}; asked for was {here}", param="state")
    return record


def seed_of(path: Path | None) -> int | None:
    """The seed of the run in the file, if there is one."""
    if path is None or not path.exists():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["seed"])
    except (ValueError, KeyError, TypeError):
        raise InvalidRequestError(f"{path} holds no run: it has no seed", param="state") from None
