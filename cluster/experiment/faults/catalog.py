"""All planted faults by name, behind the gate. A fault of one's own can be given as FILE.py:NAME."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from cluster.api.errors import InvalidRequestError, PermissionDeniedError
from cluster.experiment.faults import (
    blocks,
    index,
    keys,
    layout,
    packing,
    prefix,
    sampling,
    scheduling,
    serving,
    session,
)
from cluster.experiment.faults.fault import Fault

GATE = "WATCHWORD_ALLOW_PLANTED_FAULTS"
_ALL = (
    *packing.FAULTS,
    *layout.FAULTS,
    *blocks.FAULTS,
    *keys.FAULTS,
    *prefix.FAULTS,
    *scheduling.FAULTS,
    *sampling.FAULTS,
    *serving.FAULTS,
    *index.FAULTS,
    *session.FAULTS,
)


def planted_faults(names: str) -> tuple[Fault, ...]:
    """`names`: all, one or several names, or FILE.py:NAME of a Fault.

    Raises PermissionDeniedError unless the gate is open, InvalidRequestError for an unknown name.
    """
    if os.environ.get(GATE) != "1":
        raise PermissionDeniedError(f"planted faults are refused unless {GATE}=1 is in the environment")
    if names == "all":
        return _ALL
    return tuple(_find(name.strip()) for name in names.split(","))


def _find(name: str) -> Fault:
    path, colon, attribute = name.rpartition(":")
    if colon:
        return _load(Path(path), attribute)
    for fault in _ALL:
        if fault.name == name:
            return fault
    known = ", ".join(fault.name for fault in _ALL)
    raise InvalidRequestError(f"no planted fault is called {name!r}; there are: {known}", param="planted")


def _load(path: Path, attribute: str) -> Fault:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InvalidRequestError(f"{path} is no Python file", param="planted")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fault = getattr(module, attribute, None)
    if not isinstance(fault, Fault):
        raise InvalidRequestError(f"{attribute!r} in {path} is no Fault", param="planted")
    return fault
