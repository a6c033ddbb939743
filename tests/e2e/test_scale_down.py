"""A worker that Serve takes away costs no answer (scale_down.py, in a process of its own)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(1200)]


def test_a_worker_that_is_taken_away_costs_no_answer() -> None:
    script = Path(__file__).with_name("scale_down.py")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=1100)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert found["faults"] == []
    assert found["ends"] == {"done": found["requests"]}, found
    assert found["streaming_when_told"] > 0, f"void: {found}"
