"""The event log held against the plan: whose blocks may a request take?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.experiment.observation import Reuse, RoundObservation
from cluster.experiment.plan import PlannedRequest, Round
from cluster.experiment.reuse_oracle import FOREIGN_REUSE, ReuseOracle
from cluster.experiment.targets.embedded import EmbeddedTarget
from cluster.experiment.targets.weights import LoadedModel
from workers.config import EngineConfig

TEXT = "river stone garden window paper table summer bread music lamp"


def ask(name: str, user: str, session: str | None = None) -> PlannedRequest:
    return PlannedRequest(name, "A", user, "", "en", (("user", TEXT),), 2, 0, session=session)


async def boundary(reader: PlannedRequest, writer: PlannedRequest, scope: str | None) -> str | None:
    """As judged when the block was written in the round before."""
    oracle = ReuseOracle()
    await oracle.judge(Round(0, (writer,)), RoundObservation(0, {}))
    seen = RoundObservation(1, {}, reuses=(Reuse(reader.name, writer.name, scope, 7, 3),))
    findings = await oracle.judge(Round(1, (reader,)), seen)
    assert all(finding.kind == FOREIGN_REUSE and finding.request == reader.name for finding in findings)
    return str(findings[0].evidence["boundary"]) if findings else None


@pytest.mark.parametrize(
    ("reader", "writer", "scope", "expected"),
    [
        (ask("r", "ada"), ask("w", "bo"), "USER", "user"),
        (ask("r", "ada", "x"), ask("w", "bo", "x"), "SESSION", "user"),
        (ask("r", "ada", "x"), ask("w", "ada", "y"), "SESSION", "session"),
        (ask("r", "ada"), ask("w", "ada", "y"), "SESSION", "session"),
        (ask("r", "ada"), ask("w", "bo"), None, "user"),
        (ask("r", "ada"), ask("w", "ada"), "USER", None),
        (ask("r", "ada", "x"), ask("w", "ada", "x"), "SESSION", None),
        (ask("r", "ada"), ask("w", "bo"), "TEMPLATE", None),
    ],
)
async def test_a_narrow_block_stays_with_its_user_and_session(
    reader: PlannedRequest, writer: PlannedRequest, scope: str | None, expected: str | None
) -> None:
    assert await boundary(reader, writer, scope) == expected


async def test_the_engines_own_reuse_is_seen_and_stays_within_a_session(tiny: LoadedModel) -> None:
    """Both halves: the same session takes blocks, which the oracle sees and allows; another one takes none."""
    target = EmbeddedTarget(tiny, EngineConfig(num_blocks=64, max_model_len=512))
    await target.run_round(Round(0, (ask("first", "ada", "x"),)))
    requests = (ask("again", "ada", "x"), ask("other", "ada", "y"), ask("none", "ada"), ask("stranger", "bo", "x"))
    seen = await target.run_round(Round(1, tuple(replace(one, arrival_step=2 * i) for i, one in enumerate(requests))))
    taken = {reuse.reader: reuse.writer for reuse in seen.reuses}
    assert taken == {"again": "first"}
