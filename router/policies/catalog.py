"""Policies by name. Each call makes a fresh one, since some keep state."""

from __future__ import annotations

from collections.abc import Callable

from router.policies.baselines import (
    LeastRequestsPolicy,
    LeastTokensPolicy,
    PowerOfTwoPolicy,
    RandomPolicy,
    RoundRobinPolicy,
)
from router.policies.scored import DynamoPolicy, LlmdPolicy, LmetricPolicy, OraclePolicy
from router.policies.threshold import AibrixPolicy, RayPrefixPolicy, SglangPolicy
from router.policies.watchword import WatchwordPolicy
from router.policy import Policy

POLICIES: dict[str, Callable[[], Policy]] = {
    "random": RandomPolicy,
    "round_robin": RoundRobinPolicy,
    "power_of_two": PowerOfTwoPolicy,
    "least_requests": LeastRequestsPolicy,
    "least_tokens": LeastTokensPolicy,
    "ray_prefix": RayPrefixPolicy,
    "sglang": SglangPolicy,
    "aibrix": AibrixPolicy,
    "llm_d": LlmdPolicy,
    "dynamo": DynamoPolicy,
    "dynamo_prefill": lambda: DynamoPolicy(decode_weight=0.0, name="dynamo_prefill"),
    "lmetric": LmetricPolicy,
    "watchword": WatchwordPolicy,
    "oracle": OraclePolicy,
}


def make_policy(name: str) -> Policy:
    """Raises ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}, known are {', '.join(POLICIES)}")
    return POLICIES[name]()
