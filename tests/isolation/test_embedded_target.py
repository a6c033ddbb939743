"""The engine under the experiment is the real one, its rounds share steps, and on a clean engine no oracle speaks."""

from __future__ import annotations

from dataclasses import replace

from cluster.experiment.oracles import ExactnessOracle, StructureOracle
from cluster.experiment.plan import make_plan
from cluster.experiment.runner import run_experiment
from cluster.experiment.targets.embedded import ALARM_COUNTERS, EmbeddedTarget
from cluster.experiment.targets.solo import SoloEngine
from cluster.experiment.targets.weights import LoadedModel
from cluster.experiment.verdict import Requirements, Status
from cluster.experiment.workload import Workload
from workers.config import EngineConfig

CONFIG = EngineConfig(num_blocks=512, max_model_len=2048, check_conservation=True)
TINY_CANNOT_OBEY = Requirements(own_marker=False)


async def test_clean_engine_is_clean_under_all_oracles(tiny: LoadedModel) -> None:
    plan = make_plan(1, 6, Workload(mixed_sampling=True, abort_fraction=0.5))
    target = EmbeddedTarget(tiny, CONFIG)
    oracles = [ExactnessOracle(SoloEngine(tiny, CONFIG)), StructureOracle(ALARM_COUNTERS)]
    result = await run_experiment(target, plan, oracles=oracles, requirements=TINY_CANNOT_OBEY)
    assert result.verdict.status is Status.CLEAN, result.verdict.reasons
    assert all(found.shared_step for found in result.rounds)
    assert result.controls["same user, same prompt: cached tokens"] != "0"


async def test_same_plan_gives_the_same_steps_and_tokens(tiny: LoadedModel) -> None:
    planned = make_plan(1, 1, Workload()).rounds[0]
    first, second = [await EmbeddedTarget(tiny, CONFIG).run_round(planned) for _ in range(2)]
    assert first == second


async def test_prefix_cache_off_expects_no_reuse(tiny: LoadedModel) -> None:
    target = EmbeddedTarget(tiny, replace(CONFIG, prefix_caching=False))
    control = await target.reuse_control()
    assert (control.num_cached_tokens, control.failed) == (0, False)
