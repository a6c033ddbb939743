"""Faults built into a live worker, so that the isolation checks can be seen to find them. Never without the gate."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cache_service.block_key import BlockKeyer, ModelIdentity
from cluster.api.errors import PermissionDeniedError
from workers.build import EngineParts
from workers.forward_model import ForwardModel
from workers.step import ModelRunner

logger = logging.getLogger(__name__)

GATE = "WATCHWORD_ALLOW_PLANTED_FAULTS"


@dataclass(frozen=True)
class PlantedFault:
    """`factory` is an import path MODULE:FUNCTION that makes PlantedParts of a name. `rank`: in that replica alone."""

    factory: str
    name: str
    rank: int | None = None


class PlantedParts(Protocol):
    """The collaborators to replace; None where the real one stays."""

    @property
    def engine(self) -> EngineParts: ...
    @property
    def keyer(self) -> Callable[[bytes, ModelIdentity], BlockKeyer]: ...
    @property
    def wrap_model(self) -> Callable[[ForwardModel], ForwardModel] | None: ...
    @property
    def wrap_runner(self) -> Callable[[ModelRunner], ModelRunner] | None: ...


def planted_parts(planted: PlantedFault | None, rank: int) -> PlantedParts | None:
    """None where nothing is planted, or in another replica. Raises PermissionDeniedError while the gate is shut."""
    if planted is None:
        return None
    if os.environ.get(GATE) != "1":
        raise PermissionDeniedError(f"planted faults are refused unless {GATE}=1 is in the environment")
    if planted.rank not in (None, rank):
        return None
    logger.warning("planting the fault %s", planted.name)
    module, _, function = planted.factory.partition(":")
    parts: PlantedParts = getattr(importlib.import_module(module), function)(planted.name)
    return parts
