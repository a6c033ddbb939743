"""Real prompts, pairs, twins and tricky texts: a sample beside this file, the whole in the data folder.

Both hold the same files with the same fields; `tests/isolation/data/README.md` names the sources and licences.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

SAMPLE = Path(__file__).parent / "data"

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}

Record = dict[str, Any]


def whole_folder() -> Path:
    """Beside the checkout, or where WATCHWORD_SHARED says."""
    return Path(os.environ.get("WATCHWORD_SHARED", Path(__file__).parents[3] / "shared")) / "data"


@dataclass(frozen=True)
class PromptData:
    folder: Path

    def read(self, name: str) -> list[Record]:
        # Split on "\n" alone: values hold other characters that Python takes for line ends.
        text = (self.folder / f"{name}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.split("\n") if line]

    @cached_property
    def templates(self) -> dict[str, Record]:
        return {record["id"]: record for record in self.read("templates")}

    def values(self, pair: Record, side: str) -> dict[str, Any]:
        """The variables of one side of a pair, whichever way the record gives them."""
        given = pair[side]
        if "vars" in given:
            return dict(given["vars"])
        variables = self.templates[pair["template_id"]]["variables"]
        return {name: variables[name][index] for name, index in given["var_index"].items()}


def types_of(template: Record) -> dict[str, str]:
    """The declared type of each variable, from its values."""
    return {name: _TYPES[type(values[0])] for name, values in template["variables"].items()}


def assignments(template: Record) -> list[dict[str, Any]]:
    """One assignment per row of values; variables with fewer values repeat their last one."""
    variables: Mapping[str, list[Any]] = template["variables"]
    num_rows = max(len(values) for values in variables.values())
    return [{name: values[min(row, len(values) - 1)] for name, values in variables.items()} for row in range(num_rows)]
