"""A worker that Serve takes away costs no answer (scale_down.py, in a process of its own)."""

from __future__ import annotations

import pytest
from script_run import run_script

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(1200)]


def test_a_worker_that_is_taken_away_costs_no_answer() -> None:
    (found,) = run_script("scale_down.py", timeout_s=1100)
    assert found["faults"] == []
    assert found["ends"] == {"done": found["requests"]}, found
    assert found["streaming_when_told"] > 0, f"void: {found}"
