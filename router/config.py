"""Settings of the router, validated on construction."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _require(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, allowed are {low} to {high}")


@dataclass(frozen=True)
class TenantLimits:
    """One tenant's share: `weight` relative to others while they compete; rates None mean unlimited."""

    weight: float = 1.0
    requests_per_min: float | None = None
    tokens_per_min: float | None = None  # prompt plus max_tokens

    def __post_init__(self) -> None:
        _require("weight", self.weight, 0.001, 1000.0)
        for name in ("requests_per_min", "tokens_per_min"):
            value = getattr(self, name)
            if value is not None:
                _require(name, value, 1, 1e12)


@dataclass(frozen=True)
class CircuitConfig:
    """A worker that fails `failure_threshold` times in a row takes no work for `cooldown_s`, then one trial request."""

    failure_threshold: int = 3
    cooldown_s: float = 2.0
    max_cooldown_s: float = 30.0  # doubles with every failed trial, up to this

    def __post_init__(self) -> None:
        _require("failure_threshold", self.failure_threshold, 1, 1000)
        _require("cooldown_s", self.cooldown_s, 0.01, 600)
        _require("max_cooldown_s", self.max_cooldown_s, self.cooldown_s, 3600)


@dataclass(frozen=True)
class AdmissionConfig:
    """The queue in front of the workers and what is refused."""

    max_queued_requests: int = 256
    max_queue_wait_s: float = 60.0
    worker_wait_s: float = 5.0  # how long a request waits while no worker at all is live
    extra_seqs_per_worker: int = 2  # placed beyond max_num_seqs, so that a freed slot is filled without a round trip
    reserved_seqs_per_worker: int = 1  # kept for tenants below their share, while several are active
    active_window_s: float = 600.0  # a tenant counts as active for so long after its last request
    max_tenants: int = 10_000  # tenants remembered; the longest idle ones are forgotten
    default_limits: TenantLimits = field(default_factory=TenantLimits)
    expected_output_tokens: int = 256  # charged for an output of unknown length, at most max_tokens

    def __post_init__(self) -> None:
        _require("max_queued_requests", self.max_queued_requests, 0, 1_000_000)
        _require("max_queue_wait_s", self.max_queue_wait_s, 0.001, 86_400)
        _require("worker_wait_s", self.worker_wait_s, 0, 600)
        _require("extra_seqs_per_worker", self.extra_seqs_per_worker, 0, 10_000)
        _require("reserved_seqs_per_worker", self.reserved_seqs_per_worker, 0, 10_000)
        _require("active_window_s", self.active_window_s, 0, 86_400)
        _require("max_tenants", self.max_tenants, 1, 10_000_000)
        _require("expected_output_tokens", self.expected_output_tokens, 1, 1_000_000)


@dataclass(frozen=True)
class RouterConfig:
    heartbeat_ttl_s: float = 3.0  # snapshots come every 0.5 s; six missed ones mean that the worker is gone
    reservation_grace_s: float = 5.0  # a reservation this young may be unknown to the engine: it is still on its way
    speculation_ttl_s: float = 5.0  # how long a placed prompt counts as cached before an event confirms it
    default_prefill_tokens_per_s: float = 1000.0  # until a worker has measured its own
    affinity_ttl_s: float = 300.0
    max_affinity_keys: int = 100_000
    congestion_per_s: float = 0.3
    decode_weight: float = 1.0
    affinity_slack_s: float = 0.1
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    circuit: CircuitConfig = field(default_factory=CircuitConfig)

    def __post_init__(self) -> None:
        _require("heartbeat_ttl_s", self.heartbeat_ttl_s, 0.1, 600)
        _require("reservation_grace_s", self.reservation_grace_s, 0.1, 600)
        _require("speculation_ttl_s", self.speculation_ttl_s, 0, 600)
        _require("default_prefill_tokens_per_s", self.default_prefill_tokens_per_s, 1, 1e9)
        _require("affinity_ttl_s", self.affinity_ttl_s, 0, 86_400)
        _require("max_affinity_keys", self.max_affinity_keys, 0, 100_000_000)
        _require("congestion_per_s", self.congestion_per_s, 0, 1000)
        _require("decode_weight", self.decode_weight, 0, 100)
        _require("affinity_slack_s", self.affinity_slack_s, 0, 600)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RouterConfig:
        """From parsed YAML; unknown keys are refused by name."""
        nested = {"admission": AdmissionConfig, "circuit": CircuitConfig}
        known = {item.name for item in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown router settings {unknown}, known are {sorted(known)}")
        prepared = dict(values)
        for name, kind in nested.items():
            if isinstance(prepared.get(name), dict):
                prepared[name] = kind(**prepared[name])
        return cls(**prepared)
