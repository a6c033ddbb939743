"""A node that is killed and one that falls silent cost no answer (three_nodes.py, in a process of its own)."""

from __future__ import annotations

import pytest
from script_run import run_script

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(1200)]


def test_a_killed_and_a_silent_node_cost_no_answer() -> None:
    (found,) = run_script("three_nodes.py", timeout_s=1100)
    assert found["faults"] == []
    assert found["ends"] == {"done": found["requests"]}, found
    assert found["hit_by_kill"] > 0, f"void: {found}"
    assert found["hit_by_cut"] > 0, f"void: {found}"
