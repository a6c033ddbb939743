"""`python -m workers.gpu_check --json FILE`: what the GPU path does on the device at hand, in one JSON file.

The tests of the GPU path compiled instead of interpreted, bit-exactness at real shapes, sliding windows that forget
against layers that keep everything, and prefill and decode speed of random Llamas of about 1 and 8 billion weights
against the bandwidth and the matrix rate that the device shows here.
Exit status: 0 all is well, 1 something failed, 2 there is no usable device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from workers.device import why_no_cuda

BUDGET_S = 420.0  # nothing new is started after this
TESTS_TIMEOUT_S = 210.0
TESTS = ("test_triton_attention.py", "test_triton_model.py", "test_triton_sampling.py", "test_triton_windows.py")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and measure the GPU path.")
    parser.add_argument("--json", type=Path, required=True, help="file to write the findings to")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    options = parser.parse_args()
    missing = why_no_cuda()
    if missing is not None:
        print(f"gpu-check: nothing was checked, because {missing}", file=sys.stderr)
        return 2
    started = time.monotonic()
    findings: dict[str, Any] = {"ok": True}

    def section(name: str, work: Callable[[], Any]) -> None:
        """One failure must not cost the other findings, and each is on disk at once."""
        if time.monotonic() - started > BUDGET_S:
            findings[name] = {"skipped": f"more than {BUDGET_S:.0f} s were over"}
        else:
            begun = time.monotonic()
            try:
                findings[name] = work()
            except Exception as error:
                findings[name] = {"error": f"{type(error).__name__}: {error}"}
            if not isinstance(findings[name], dict) or findings[name].get("ok", "error" not in findings[name]) is False:
                findings["ok"] = False
            print(f"gpu-check: {name} took {time.monotonic() - begun:.1f} s", flush=True)
        findings["duration_s"] = time.monotonic() - started
        options.json.write_text(json.dumps(findings, indent=1) + "\n", encoding="utf-8")

    if not options.skip_tests:
        section("tests", _run_tests)
    from workers.cuda import measure  # needs triton

    section("device", measure.describe_device)
    section("windows", measure.check_windows)
    section("ceilings", measure.measure_ceilings)
    for name in measure.SHAPES:
        section(f"llama_{name}", partial(measure.measure_model, name, findings["ceilings"]))
    print(f"gpu-check: {'all is well' if findings['ok'] else 'SOMETHING FAILED'}, see {options.json}")
    return 0 if findings["ok"] else 1


def _run_tests() -> dict[str, Any]:
    """In a process of their own, with the kernels compiled."""
    folder = Path(__file__).parents[1] / "tests" / "workers"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{folder}:{folder.parents[1]}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", *(str(folder / test) for test in TESTS)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TESTS_TIMEOUT_S, check=False
    )  # fmt: skip
    return {"ok": done.returncode == 0, "output": (done.stdout + done.stderr)[-3000:]}


if __name__ == "__main__":
    sys.exit(main())
