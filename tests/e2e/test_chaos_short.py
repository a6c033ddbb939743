"""The short form of chaos_scenarios.py, on the cluster that the other tests use."""

from __future__ import annotations

import chaos_scenarios as scenarios
import pytest
from chaos_load import answer_alone, make_questions
from chaos_rig import ChaosRig

pytestmark = [pytest.mark.e2e, pytest.mark.weights, pytest.mark.timeout(1000)]


@pytest.fixture
async def rig(cluster) -> ChaosRig:
    server, keys = cluster.server, cluster.keys
    questions = await answer_alone(server.url, keys.delegate, make_questions(8))
    rig = ChaosRig(server, keys.operator, keys.delegate, questions)
    await rig.measure_idle()
    return rig


async def test_faults_that_cost_no_answer(rig: ChaosRig) -> None:
    await scenarios.disconnects(rig, 40)
    await scenarios.id_reuse(rig, 24)
    await scenarios.kill_router(rig, 60, num_times=1)
    await scenarios.kill_worker(rig, 60, num_times=1)
