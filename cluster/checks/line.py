"""One line of the checklist."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckLine:
    """`evidence` is what was seen, in a sentence; it holds no key and no answer."""

    name: str
    passed: bool
    evidence: str


def line(name: str, faults: list[str], evidence: str) -> CheckLine:
    """Red when there is a fault; the faults are the evidence then."""
    return CheckLine(name, not faults, "; ".join(faults) or evidence)
