"""Does a corrupted answer depend on what its neighbours say, or only on how long they are?

A mask that lets a query see foreign keys carries content; positions that run on carry lengths only. The round is run
again with every neighbour's prompt reversed, token by token: other content of the same length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cluster.experiment.finding import Finding
from cluster.experiment.observation import TokenTrace
from cluster.experiment.plan import Plan, Round
from cluster.experiment.targets.target import Target


async def depends_on_neighbours(make_target: Callable[[], Target], plan: Plan, finding: Finding) -> bool:
    """`finding` is one of the exactness oracle's with an output index."""
    first = await _corrupted_token(make_target(), plan, finding, is_scrambled=False)
    second = await _corrupted_token(make_target(), plan, finding, is_scrambled=True)
    return first != second


async def _corrupted_token(target: Target, plan: Plan, finding: Finding, *, is_scrambled: bool) -> TokenTrace | None:
    for planned in plan.rounds[: finding.round_index + 1]:
        is_last = planned.index == finding.round_index
        seen = await target.run_round(_scrambled(planned, finding.request) if is_last and is_scrambled else planned)
    assert finding.request is not None
    tokens = seen.by_name[finding.request].engine_tokens or ()
    index = finding.evidence["output_index"]
    return tokens[index] if index < len(tokens) else None


def _scrambled(planned: Round, kept: str | None) -> Round:
    requests = tuple(
        request if request.name == kept else replace(request, is_scrambled=True) for request in planned.requests
    )
    return replace(planned, requests=requests)
