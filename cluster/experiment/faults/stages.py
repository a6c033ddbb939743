"""The traffic in which planted faults are looked for: a few short rounds for each way in which state is shared.

Every fault meets the stages in the same order, so nothing about it is given away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.experiment.condition import Condition
from cluster.experiment.plan import Plan, make_plan
from cluster.experiment.targets.house_rules import REGIONS
from cluster.experiment.targets.weights import LoadedModel
from cluster.experiment.verdict import Requirements
from cluster.experiment.workload import Workload
from workers.config import EngineConfig, Layout

_ENGLISH = ("system-last", "confirmed")
_BOTH = ("confirmed", "zh-system-last", "system-last", "zh-confirmed")
_ANY = Requirements(allow_pressure=True, own_marker=False)
_SMALL = Workload(concurrency=4, num_fillers=2, wordings=_ENGLISH, max_tokens=16, filler_max_tokens=24)


@dataclass(frozen=True, slots=True)
class Stage:
    """A condition with its recorded plan."""

    condition: Condition
    plan: Plan
    num_blocks_roomy: int  # a pool of this size never evicts: what "no pressure" means when bisecting


def make_stages(loaded: LoadedModel, seed: int, num_rounds: int, long_words: int = 130) -> list[Stage]:
    """`long_words` make a prompt longer than one prefill chunk."""
    shared = replace(
        _SMALL, context_words=(long_words, long_words), prefix_similarity=1.0, arrival_gap_steps=0, max_tokens=8
    )
    mixed = replace(_SMALL, wordings=_BOTH, mixed_sampling=True, abort_fraction=0.5, max_tokens=24)
    # One wording, so that users come back with a prefix that some worker holds.
    returning = replace(_SMALL, wordings=("confirmed",), num_fillers=4)
    # Two conversations of one user that begin alike; long enough for a whole block of the same tokens.
    talking = replace(
        _SMALL,
        wordings=("confirmed",),
        num_sessions=2,
        num_fillers=0,
        context_words=(20, 20),
        prefix_similarity=1.0,
        max_tokens=4,
    )
    templated = replace(_SMALL, regions=REGIONS, concurrency=6)
    # Answers that outgrow the reserve of one block a sequence: running requests must be preempted.
    crowd = replace(_SMALL, concurrency=6, arrival_gap_steps=0, max_tokens=72, filler_max_tokens=72, ignore_eos=True)
    return [
        _stage(loaded, "baseline", seed, num_rounds, _SMALL),
        _stage(loaded, "mixed sampling", seed, num_rounds, mixed),
        _stage(loaded, "shared prefixes", seed, num_rounds, shared),
        _stage(loaded, "two sessions of one user", seed, num_rounds, talking),
        _stage(loaded, "registered template", seed, num_rounds, templated),
        _indexed(_stage(loaded, "two workers", seed, max(num_rounds, 4), returning)),
        _stage(loaded, "padded layout", seed, num_rounds, _SMALL, layout=Layout.PADDED),
        _stage(loaded, "pool pressure", seed, num_rounds, crowd, has_pressure=True),
    ]


def _stage(
    loaded: LoadedModel,
    name: str,
    seed: int,
    num_rounds: int,
    workload: Workload,
    *,
    layout: Layout = Layout.PACKED,
    has_pressure: bool = False,
) -> Stage:
    plan = make_plan(seed, num_rounds, workload)
    needs = [[loaded.num_blocks_of(request) for request in planned.requests] for planned in plan.rounds]
    roomy = 2 * sum(map(sum, needs))
    # Two thirds of what one round holds at once: blocks are evicted, and running requests preempted.
    tight = max(max(map(max, needs)) + 2, 2 * max(map(sum, needs)) // 3)
    engine = EngineConfig(
        num_blocks=tight if has_pressure else roomy,
        max_model_len=2048,
        layout=layout,
        max_pinned_fraction=0.25 if workload.regions else 0.0,
        checksum_blocks=True,
    )
    return Stage(Condition(name, engine, workload, _ANY), plan, roomy)


def _indexed(stage: Stage) -> Stage:
    """The same traffic over two workers behind the index, all of them restarted after every third round."""
    return replace(stage, condition=replace(stage.condition, num_workers=2, restart_every=3, has_index=True))
