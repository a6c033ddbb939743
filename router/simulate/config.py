"""The settings of a simulated cluster, validated on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from router.config import AdmissionConfig
from router.simulate.step_cost import StepCost

MEASURED_STEP_COST = StepCost(base_s=0.0674, prefill_token_s=0.000871, decode_seq_s=0.0085)
"""Fitted to steps of Watchword's CPU engine on SmolLM2-135M (one thread), by tests/router/measure_step_times.py."""


class EngineKind(Enum):
    SERIAL = "serial"
    SHARED = "shared"


@dataclass(frozen=True)
class SimulationConfig:
    """`block_size_tokens` is that of the trace. `lag_s` is the age of what router replicas know of one another."""

    num_workers: int = 8
    cache_blocks: int = 4000
    block_size_tokens: int = 512
    num_routers: int = 1
    lag_s: float = 0.0
    engine: EngineKind = EngineKind.SERIAL
    prefill_tokens_per_s: float = 6000.0
    decode_token_s: float = 0.020
    step_cost: StepCost = MEASURED_STEP_COST  # of shared engines, brought to prefill_tokens_per_s
    token_budget: int = 2048  # of shared engines: tokens in a step
    max_num_seqs: int = 64  # of shared engines, and what admission counts; serial ones decode as many as come
    newcomers_first: bool = False  # of shared engines: a prompt's first chunk goes before those begun earlier
    report_period_s: float = 0.5  # of shared engines: how often a worker's snapshot corrects the router
    admission: AdmissionConfig | None = None  # None: whatever comes is placed at once
    seed: int = 1

    def __post_init__(self) -> None:
        self._require("num_workers", 1, 100_000)
        self._require("cache_blocks", 0, 1_000_000_000)
        self._require("block_size_tokens", 1, 1_000_000)
        self._require("num_routers", 1, 1000)
        self._require("lag_s", 0.0, math.inf)
        self._require("prefill_tokens_per_s", 0.001, 1e9)
        self._require("decode_token_s", 0.0, 1000.0)
        self._require("token_budget", 1, 10_000_000)
        self._require("max_num_seqs", 1, 1_000_000)
        self._require("report_period_s", 0.001, 3600.0)
        if self.admission is not None and self.num_routers != 1:
            raise ValueError(f"num_routers is {self.num_routers}, allowed with admission is 1: it has one queue")

    def with_step_cost(self, cost: StepCost) -> SimulationConfig:
        return replace(self, step_cost=cost)

    def _require(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, allowed are {low} to {high}")
