"""A script of this folder in a process of its own, since Ray can be started once in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_script(name: str, timeout_s: float) -> list[dict[str, Any]]:
    """The JSON objects that it printed, a line each. Ray may print between them."""
    script = Path(__file__).with_name(name)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"')]
    print("\n".join(lines))
    return [json.loads(line) for line in lines]
