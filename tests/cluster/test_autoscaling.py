"""What Serve's autoscaler is told and what it makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from cluster.api.errors import InvalidRequestError
from cluster.app import _worker_deployment, num_threads
from cluster.autoscaling import OCCUPANCY, workers_needed
from cluster.config import ClusterConfig, load_config


def autoscaling_of(config: ClusterConfig) -> AutoscalingConfig | None:
    found: AutoscalingConfig | None = _worker_deployment(config)._deployment_config.autoscaling_config
    return found


def decide(config: AutoscalingConfig, occupancies: list[float]) -> int:
    """What Serve decides with these workers: the policy as it travels to the controller, delays and factors applied."""
    context: Any = AutoscalingContext(
        deployment_id=None,  # type: ignore[arg-type]
        deployment_name="Worker",
        app_name="watchword",
        current_num_replicas=len(occupancies),
        target_num_replicas=len(occupancies),
        running_replicas=[],
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics={OCCUPANCY: dict(enumerate(occupancies))},  # type: ignore[dict-item]
        raw_metrics={},
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=config,
    )
    number, _ = _apply_autoscaling_config(config.policy.get_policy())(context)
    return number


@pytest.mark.parametrize(
    ("occupancies", "expected"),
    [([1.25, 1.25], 4), ([0.7, 0.7], 2), ([0.1, 0.1, 0.1], 1), ([0.9, 0.9], 3)],
)
def test_as_many_workers_as_the_load_needs(occupancies: list[float], expected: int) -> None:
    settings = {"workers": 2, "max_workers": 5, "upscale_delay_s": 0, "downscale_delay_s": 0}
    config = autoscaling_of(load_config(settings, environ={}))
    assert config is not None
    assert (config.min_replicas, config.max_replicas) == (2, 5), "Serve keeps to them"
    assert decide(config, occupancies) == expected


def test_nothing_is_known_before_workers_report() -> None:
    class Empty:
        aggregated_metrics = None

    assert workers_needed(Empty()) == (0.0, {})


def test_without_a_maximum_the_number_of_workers_is_fixed() -> None:
    config = load_config({"workers": 3}, environ={})
    assert autoscaling_of(config) is None
    assert _worker_deployment(config).num_replicas == 3


def test_threads_are_those_of_the_most_workers() -> None:
    """They are part of the numerics: a worker that comes later must be able to go on with another's stream."""
    few, many = (load_config({"workers": number, "max_workers": 4}, environ={}) for number in (1, 4))
    assert num_threads(few) == num_threads(many)


def test_bounds_are_checked() -> None:
    with pytest.raises(InvalidRequestError, match="max_workers is 1"):
        load_config({"workers": 2, "max_workers": 1}, environ={})
