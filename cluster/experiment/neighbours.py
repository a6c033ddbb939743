"""Does a corrupted answer depend on what its neighbours say, or only on how long they are?

A mask that lets a query see foreign keys carries content; positions that run on carry lengths only. The round is run
again with every neighbour's prompt reversed, token by token: other content of the same length. What was read from the
prefix cache stays as it is, since other hits would be other steps, and neighbours run to their full length both times:
who shares a step with whom, and in which row, must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cluster.experiment.finding import Finding
from cluster.experiment.observation import Observation
from cluster.experiment.oracles import SoloReference, compare_with_solo
from cluster.experiment.plan import Plan, PlannedRequest, Round
from cluster.experiment.targets.target import Target


async def depends_on_neighbours(
    make_target: Callable[[], Target], plan: Plan, finding: Finding, reference: SoloReference
) -> bool | None:
    """`finding` is one of the exactness oracle's. None when the answer is right once its neighbours run to the end."""
    planned = plan.rounds[finding.round_index]
    request = next(one for one in planned.requests if one.name == finding.request)
    seen = await _run(make_target(), plan, planned, request, reversed_after=None)
    original = seen[request.name]
    if compare_with_solo(planned.index, request.name, original, await reference.solo(request)) is None:
        return None
    # Whoever was hit wrote what was read, so all keep as many tokens as anyone took from the cache.
    num_kept = max(one.num_cached_tokens or 0 for one in seen.values())
    other = (await _run(make_target(), plan, planned, request, reversed_after=num_kept))[request.name]
    return original.engine_tokens != other.engine_tokens


async def _run(
    target: Target, plan: Plan, planned: Round, request: PlannedRequest, *, reversed_after: int | None
) -> Mapping[str, Observation]:
    for earlier in plan.rounds[: planned.index]:
        await target.run_round(earlier)
    requests = tuple(
        one
        if one is request
        else replace(one, reversed_after=reversed_after, ignore_eos=True, stop=(), abort_after_tokens=None)
        for one in planned.requests
    )
    return (await target.run_round(replace(planned, requests=requests))).by_name
