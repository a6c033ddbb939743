"""Before any test module imports torch or triton: kernels run in Triton's interpreter, where there is no device.

Also says what `pytest -n` may run side by side: files, but never two of the clusters of tests/e2e. And that hypothesis
draws the same examples every time and does not hold a test to a time: a machine may be slow or stand still.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from cluster.prompts.sandbox import TemplateSandbox

os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile(
    "watchword", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("watchword")

TESTS = Path(__file__).parent
# The longest first, so that no process is left with them at the end. While the clusters of e2e run, their neighbours
# are tests of the engine, which need a processor but no clock.
FIRST = ("e2e", "workers", "isolation", "router", "cluster")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {folder: rank for rank, folder in enumerate(FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.relative_to(TESTS).parts[0], len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler.loadfile import LoadFileScheduling

    class OneClusterAtATime(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/e2e" if file.startswith("tests/e2e/") else file

    return OneClusterAtATime(config, log)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    """A process that renders templates: one for a file of tests, since it takes a second to start."""
    from cluster.prompts.sandbox import TemplateSandbox

    sandbox = TemplateSandbox()
    yield sandbox
    sandbox.close()
