"""How a GPU's memory is shared out, and which worker gets a GPU. Arithmetic only: no device is needed."""

from __future__ import annotations

from typing import Any

import pytest
from triton_builders import require_triton

require_triton()

from cluster.app import worker_device, worker_settings  # noqa: E402
from cluster.config import ClusterConfig  # noqa: E402
from workers.cuda.decode import decode_buckets  # noqa: E402
from workers.cuda.load import largest_batch, plan_that_fits  # noqa: E402
from workers.runner_config import RunnerConfig  # noqa: E402


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gpu_memory_fraction": 0.5}, 4),
        ({"gpu_memory_fraction": 0.99}, 7),
        ({"num_blocks": 8}, 8),
        ({"gpu_memory_fraction": None, "kv_cache_bytes": 350}, 3),
    ],
)
def test_the_pool_leaves_room_for_the_largest_step(settings: dict[str, Any], expected: int) -> None:
    plan = plan_that_fits(RunnerConfig(**settings), (None, None), free_bytes=1000, step_bytes=200, layer_block_bytes=50)
    assert (plan.num_blocks, plan.window) == (expected, None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_blocks": 9}, "num_blocks is 9"),
        ({"gpu_memory_fraction": 0.1}, "gpu_memory_fraction is 0.1"),
        ({"gpu_memory_fraction": None, "kv_cache_bytes": 900}, "kv_cache_bytes is 900"),
    ],
)
def test_what_does_not_fit_is_refused_at_start(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_that_fits(RunnerConfig(**settings), (None, None), free_bytes=1000, step_bytes=200, layer_block_bytes=50)


def test_the_largest_step_writes_nowhere() -> None:
    batch = largest_batch(RunnerConfig(max_num_batched_tokens=96, max_num_seqs=7))
    assert (batch.num_tokens, len(batch.sample_tokens)) == (96, 7)
    assert (batch.slot_blocks == -1).all()


def test_every_batch_has_a_bucket_that_is_not_much_larger() -> None:
    for most in (1, 4, 5, 64, 100, 256):
        buckets = decode_buckets(most)
        assert buckets == tuple(sorted(set(buckets)))
        assert buckets[-1] == most
    assert decode_buckets(256)[:6] == (1, 2, 4, 8, 16, 24)


def test_settings_reach_the_runner() -> None:
    config = ClusterConfig(
        device="cuda", lora={"poet": "/adapters/poet"}, gpu_memory_fraction=0.7, batch_invariant=False
    )
    runner = worker_settings(config).runner
    assert (runner.device, runner.adapters) == ("cuda", (("poet", "/adapters/poet"),))
    assert (runner.gpu_memory_fraction, runner.batch_invariant) == (0.7, False)
    assert worker_settings(ClusterConfig(kv_memory_gib=2)).runner.gpu_memory_fraction is None, "memory was given"
    assert worker_device(ClusterConfig()) == "cpu", "no cluster, no GPU in it"
