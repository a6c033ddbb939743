"""Does a corrupted answer depend on what its neighbours say, or only on how long they are?

A mask that lets a query see foreign keys carries content; positions that run on carry lengths only. The round is run
again with every neighbour's prompt reversed, token by token: other content of the same length. Neighbours run to their
full length both times, so that who shares a step with whom stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
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
    original = await _answer(make_target(), plan, planned, request, is_scrambled=False)
    if compare_with_solo(planned.index, request.name, original, await reference.solo(request)) is None:
        return None
    scrambled = await _answer(make_target(), plan, planned, request, is_scrambled=True)
    return original.engine_tokens != scrambled.engine_tokens


async def _answer(
    target: Target, plan: Plan, planned: Round, request: PlannedRequest, *, is_scrambled: bool
) -> Observation:
    for earlier in plan.rounds[: planned.index]:
        await target.run_round(earlier)
    requests = tuple(
        one
        if one is request
        else replace(one, is_scrambled=is_scrambled, ignore_eos=True, stop=(), abort_after_tokens=None)
        for one in planned.requests
    )
    seen = await target.run_round(replace(planned, requests=requests))
    return seen.by_name[request.name]
