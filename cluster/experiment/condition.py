"""One cell of an experiment: engine settings, traffic, and what the run must show to count."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.experiment.plan import Plan, make_plan
from cluster.experiment.verdict import Requirements
from cluster.experiment.workload import Workload
from workers.config import EngineConfig

_BLOCKS_PER_REQUEST = 12  # a prompt of 100 tokens and its answer, with room to spare
_MIN_BLOCKS = 512
_MAX_BLOCKS = 4096  # 1.5 GB of KV for the small default model


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


def default_engine(num_rounds: int, workload: Workload, max_model_len: int = 2048) -> EngineConfig:
    """The original experiment's settings, and a pool in which nothing needs to be evicted."""
    longest = sum(workload.context_words) // 2 * 2  # a neutral word is one or two tokens
    per_request = _BLOCKS_PER_REQUEST + longest // 16 + 8 * workload.num_turns
    wanted = num_rounds * (workload.concurrency + workload.num_fillers) * per_request
    return EngineConfig(
        num_blocks=min(max(wanted, _MIN_BLOCKS), _MAX_BLOCKS),
        max_model_len=max_model_len,
        block_size=16,
        max_num_seqs=8,
        prefix_caching=True,
    )


def baseline(num_rounds: int, workload: Workload, requirements: Requirements | None = None) -> Condition:
    engine = default_engine(num_rounds, workload)
    return Condition("baseline", engine, workload, requirements or Requirements())
