"""What a run is summed up as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TenantResult:
    """One tenant's times to first token, in seconds, and how many of its requests were refused."""

    tenant: int
    ttft_mean_s: float
    ttft_p90_s: float
    ttft_p95_s: float
    num_requests: int
    num_refused: int

    def to_json(self) -> dict[str, float]:
        return {
            "tenant": self.tenant,
            "ttft_mean_s": round(self.ttft_mean_s, 4),
            "ttft_p90_s": round(self.ttft_p90_s, 4),
            "ttft_p95_s": round(self.ttft_p95_s, 4),
            "num_requests": self.num_requests,
            "num_refused": self.num_refused,
        }


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Times in seconds, of the requests that were served. `imbalance` is the busiest worker's number of requests over
    the mean."""

    ttft_mean_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    hit_rate: float
    imbalance: float
    tenants: tuple[TenantResult, ...] = ()

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "ttft_mean_s": round(self.ttft_mean_s, 4),
            "ttft_p90_s": round(self.ttft_p90_s, 4),
            "ttft_p99_s": round(self.ttft_p99_s, 4),
            "hit_rate": round(self.hit_rate, 4),
            "imbalance": round(self.imbalance, 3),
        }
        if len(self.tenants) > 1:
            values["tenants"] = [tenant.to_json() for tenant in self.tenants]
        return values


def summarize(
    ttft_s: Sequence[float], tenants: Sequence[int], num_hit: int, num_blocks: int, placed: Sequence[int]
) -> PolicyResult:
    """`ttft_s` is not a number where a request was refused."""
    times = np.asarray(ttft_s)
    owners = np.asarray(tenants)
    served = times[~np.isnan(times)]
    p90, p99 = np.percentile(served, [90, 99])
    return PolicyResult(
        ttft_mean_s=float(served.mean()),
        ttft_p90_s=float(p90),
        ttft_p99_s=float(p99),
        hit_rate=num_hit / max(1, num_blocks),
        imbalance=max(placed) * len(placed) / max(1, sum(placed)),
        tenants=tuple(_summarize_tenant(tenant, times[owners == tenant]) for tenant in sorted(set(tenants))),
    )


def _summarize_tenant(tenant: int, times: npt.NDArray[np.float64]) -> TenantResult:
    served = times[~np.isnan(times)]
    p90, p95 = np.percentile(served, [90, 95]) if len(served) else (np.nan, np.nan)
    mean = served.mean() if len(served) else np.nan
    return TenantResult(tenant, float(mean), float(p90), float(p95), len(times), len(times) - len(served))
