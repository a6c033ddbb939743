"""Several policies on one trace: what the command line does, callable from Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from router.policies.catalog import POLICIES, make_policy
from router.simulate.config import SimulationConfig
from router.simulate.fairness import TenantComparison
from router.simulate.result import PolicyResult
from router.simulate.simulation import Simulation
from router.simulate.trace import TraceRequest, scale_load

PolicyProgress = Callable[[str, int], None]
"""Called with a policy's name and the number of requests done since the last call."""


def policy_names(choice: str) -> list[str]:
    """`all`, or names separated by commas. Raises ValueError for an unknown one."""
    if choice == "all":
        return list(POLICIES)
    names = [name.strip() for name in choice.split(",") if name.strip()]
    for name in names:
        make_policy(name)
    if not names:
        raise ValueError(f"no policy is named, known are all, {', '.join(POLICIES)}")
    return names


def run_simulation(
    requests: Sequence[TraceRequest],
    config: SimulationConfig,
    *,
    policies: Sequence[str],
    load: float = 1.0,
    progress: PolicyProgress | None = None,
) -> dict[str, PolicyResult]:
    """Runs every policy on the same requests, `load` times as fast as they were recorded."""
    scaled = scale_load(requests, load)
    results = {}
    for name in policies:

        def report(count: int, name: str = name) -> None:
            if progress is not None:
                progress(name, count)

        results[name] = Simulation(config, make_policy(name)).run(scaled, report)
    return results


Fairness = Mapping[str, Sequence[TenantComparison]]
"""By policy; empty for traffic of one tenant."""


def to_json(results: Mapping[str, PolicyResult], fairness: Fairness | None = None) -> str:
    values: dict[str, Any] = {"policies": {name: result.to_json() for name, result in results.items()}}
    for name, comparisons in (fairness or {}).items():
        values["policies"][name]["fairness"] = [each.to_json() for each in comparisons]
    return json.dumps(values, indent=1) + "\n"


def write_json(results: Mapping[str, PolicyResult], path: Path, fairness: Fairness | None = None) -> None:
    path.write_text(to_json(results, fairness), encoding="utf-8")
