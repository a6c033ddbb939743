"""One cell of an experiment: engine settings, traffic, and what the run must show to count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.experiment.plan import Plan, make_plan
from cluster.experiment.verdict import Requirements
from cluster.experiment.workload import Workload
from workers.config import EngineConfig

MIN_BLOCKS = 512
MAX_BLOCKS = 4096  # 1.5 GB of KV for the small default model


@dataclass(frozen=True, slots=True)
class Condition:
    """`num_workers` > 1 spreads the requests of a round over engines; `restart_every` replaces them between rounds."""

    name: str
    engine: EngineConfig
    workload: Workload = field(default_factory=Workload)
    requirements: Requirements = field(default_factory=Requirements)
    num_workers: int = 1
    restart_every: int | None = None
    has_index: bool = False  # requests go where the prefix index says their prefix is

    @property
    def with_template(self) -> bool:
        return bool(self.workload.regions)

    def plan(self, seed: int, num_rounds: int) -> Plan:
        return make_plan(seed, num_rounds, self.workload)


def default_engine(max_model_len: int = 2048) -> EngineConfig:
    """The original experiment's settings. `fit_pool` sees to it that nothing needs to be evicted."""
    return EngineConfig(
        num_blocks=MIN_BLOCKS, max_model_len=max_model_len, block_size=16, max_num_seqs=8, prefix_caching=True
    )


def baseline(workload: Workload, requirements: Requirements | None = None) -> Condition:
    return Condition("baseline", default_engine(), workload, requirements or Requirements())


def fit_pool(condition: Condition, num_blocks_by_round: Sequence[int]) -> Condition:
    """A pool that holds all that the rounds leave behind; where that is too much, engines are replaced in between.

    A condition that wants pressure keeps its own pool.
    """
    if condition.requirements.allow_pressure:
        return condition
    wanted = sum(num_blocks_by_round)
    num_blocks = min(max(wanted, MIN_BLOCKS, *num_blocks_by_round), max(MAX_BLOCKS, *num_blocks_by_round))
    fitted = replace(condition, engine=replace(condition.engine, num_blocks=num_blocks))
    if wanted <= num_blocks:
        return fitted
    every = max(1, num_blocks // max(num_blocks_by_round))
    return replace(fitted, restart_every=min(every, condition.restart_every or every))
