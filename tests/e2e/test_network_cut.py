"""A node that is cut off from the network or killed costs no answer (network_cut.py, in a process of its own)."""

from __future__ import annotations

import pytest
from namespaces import why_not
from script_run import run_script

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(1200)]


def test_a_node_that_is_cut_off_or_killed_costs_no_answer() -> None:
    if reason := why_not():
        pytest.skip(reason)
    blink, brief, silent, long, kill = run_script("network_cut.py", timeout_s=1100)
    for found in (blink, brief, silent, long, kill):
        assert found["hits"] > 0, f"void: {found}"
        assert found["faults"] == found["faults_afterwards"] == found["index_differs"] == [], found
        assert found["ends"] == {"done": found["requests"]}, found
        assert found["left"] == "", found
        assert len(found["index_equals"]) == 2, found
        assert found["channels"] == 2, found
        assert found["taken_afterwards"] > 0, found
    for found in (blink, brief):
        assert found["same_life"], found
    for found in (brief, silent, long):
        assert 2.4 <= found["unheard_s"] <= 5, f"placed for 3 s after the last heartbeat: {found}"
        assert found["first_moved_s"] > 4.5, f"a ping is given 5 s: {found}"
        assert found["first_moved_s"] <= 12, f"pings go unanswered for 10 s at most: {found}"
    assert long["dead_to_ray_s"] > 0, "Ray never gave the node up"
    assert long["workers_cut_off"] == 1, "what ran on the cut-off node ended before the node came back"
