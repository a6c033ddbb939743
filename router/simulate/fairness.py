"""What a flooding tenant costs the others: each tenant alone, all together, and all together behind admission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.config import AdmissionConfig
from router.policies.catalog import make_policy
from router.simulate.config import SimulationConfig
from router.simulate.result import TenantResult
from router.simulate.simulation import Progress, Simulation
from router.simulate.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class TenantComparison:
    """`alone`: only this tenant's requests, at their times, on an otherwise empty cluster."""

    alone: TenantResult
    unguarded: TenantResult
    admitted: TenantResult

    def to_json(self) -> dict[str, Any]:
        return {
            "tenant": self.alone.tenant,
            "alone": self.alone.to_json(),
            "without_admission": self.unguarded.to_json(),
            "with_admission": self.admitted.to_json(),
        }


def num_tenants(requests: Sequence[TraceRequest]) -> int:
    return len({request.tenant for request in requests})


def num_simulated(requests: Sequence[TraceRequest]) -> int:
    """Requests that one call of `compare_tenants` runs: each twice."""
    return 2 * len(requests)


def compare_tenants(
    requests: Sequence[TraceRequest],
    config: SimulationConfig,
    policy: str,
    unguarded: Sequence[TenantResult],
    progress: Progress | None = None,
) -> list[TenantComparison]:
    """One record per tenant, in order of their numbers; `unguarded` is how they fared together without admission.

    Raises ValueError for several routers, see SimulationConfig.
    """

    def run(part: Sequence[TraceRequest], settings: SimulationConfig) -> tuple[TenantResult, ...]:
        return Simulation(settings, make_policy(policy)).run(part, progress).tenants

    alone = [
        run([each for each in requests if each.tenant == result.tenant], replace(config, admission=None))[0]
        for result in unguarded
    ]
    admitted = run(requests, replace(config, admission=config.admission or AdmissionConfig()))
    return [TenantComparison(*results) for results in zip(alone, unguarded, admitted, strict=True)]
