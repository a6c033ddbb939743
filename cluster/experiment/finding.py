"""One thing that an oracle found wrong, with the evidence that names where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class OracleName(Enum):
    MARKER = "marker"
    EXACTNESS = "exactness"
    STRUCTURE = "structure"
    COUNTER = "counter"  # the second line of defence caught it before it could do harm


@dataclass(frozen=True, slots=True)
class Finding:
    """`kind` is a stable slug; `evidence` holds only what can be written to a report: names, steps, blocks, counts."""

    oracle: OracleName
    kind: str
    round_index: int
    request: str | None
    detail: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        where = f"round {self.round_index}" + (f", {self.request}" if self.request else "")
        return f"{self.oracle.value}/{self.kind} in {where}: {self.detail}"
