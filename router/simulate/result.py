"""What a run is summed up as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Times in seconds. `imbalance` is the busiest worker's number of requests over the mean."""

    ttft_mean_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    hit_rate: float
    imbalance: float
    tenant_ttft_p90_s: tuple[float, ...] = ()

    def to_json(self) -> dict[str, float | list[float]]:
        values: dict[str, float | list[float]] = {
            "ttft_mean_s": round(self.ttft_mean_s, 4),
            "ttft_p90_s": round(self.ttft_p90_s, 4),
            "ttft_p99_s": round(self.ttft_p99_s, 4),
            "hit_rate": round(self.hit_rate, 4),
            "imbalance": round(self.imbalance, 3),
        }
        if len(self.tenant_ttft_p90_s) > 1:
            values["tenant_ttft_p90_s"] = [round(value, 4) for value in self.tenant_ttft_p90_s]
        return values


def summarize(
    ttft_s: Sequence[float], tenants: Sequence[int], num_hit: int, num_blocks: int, placed: Sequence[int]
) -> PolicyResult:
    times = np.asarray(ttft_s)
    owners = np.asarray(tenants)
    p90, p99 = np.percentile(times, [90, 99])
    return PolicyResult(
        ttft_mean_s=float(times.mean()),
        ttft_p90_s=float(p90),
        ttft_p99_s=float(p99),
        hit_rate=num_hit / max(1, num_blocks),
        imbalance=max(placed) * len(placed) / max(1, sum(placed)),
        tenant_ttft_p90_s=tuple(float(np.percentile(times[owners == t], 90)) for t in sorted(set(tenants))),
    )
