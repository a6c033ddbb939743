"""Workers hold what the catalog says: new ones before they take traffic, the clock's new date after rollover."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from prompt_rig import BLOCK_SIZE, PromptRig, num_blocks

from cluster.api.channel import ControlCall, KeepPins, WarmUp
from cluster.api.errors import UnavailableError
from cluster.api.ids import BlockKey, TenantId, WorkerId
from cluster.api.scope import Scope
from cluster.api.worker_state import WorkerInfo
from cluster.prompts.sandbox import TemplateSandbox
from cluster.template_warmer import TemplateWarmer

pytestmark = pytest.mark.weights

STATIC = "You are the polite and patient assistant of a shop that sells furniture of every kind. " * 3
CLOCKED = STATIC + "Today is {{ strftime_now('%d %B %Y') }}. " + STATIC


class PinningWorkers:
    """Pin what they are told to and forget the rest, as workers do."""

    def __init__(self, *names: str) -> None:
        self.members: tuple[WorkerInfo, ...] = tuple(self.life(name) for name in names)
        self.pinned: dict[str, list[BlockKey]] = {}
        self.calls: list[ControlCall] = []
        self.unreachable: set[str] = set()

    def life(self, name: str, epoch: str = "1") -> WorkerInfo:
        return WorkerInfo(WorkerId(name), epoch, name, "m", "", BLOCK_SIZE, 1000, 8, 2048, is_warm=False)

    async def call(self, worker: WorkerInfo, call: ControlCall) -> Any:
        if worker.worker_id in self.unreachable:
            raise UnavailableError("gone")
        self.calls.append(call)
        pinned = self.pinned.setdefault(worker.worker_id, [])
        if isinstance(call, KeepPins):
            outdated = [key for key in pinned if key not in call.keys]
            pinned[:] = [key for key in pinned if key in call.keys]
            return len(outdated)
        assert isinstance(call, WarmUp)
        keys = [key for request in call.requests for key in request.block_keys]
        pinned += [key for key in keys if key not in pinned]
        return len(keys)


@pytest.fixture
def rig(tmp_path: Path, sandbox: TemplateSandbox) -> PromptRig:
    return PromptRig(tmp_path, sandbox=sandbox)


def template_keys(rig: PromptRig) -> list[BlockKey]:
    prompt = rig.ask(rig.caller())
    return list(rig.keys(prompt)[: num_blocks(prompt, Scope.TEMPLATE)])


async def test_every_worker_gets_every_template_and_a_new_one_gets_them_too(rig: PromptRig) -> None:
    workers = PinningWorkers("w1", "w2")
    now_s = 0.0
    warmer = TemplateWarmer(rig.catalog, rig.keyer, workers, "m", clock=lambda: now_s)
    rig.put(STATIC)
    workers.unreachable = {"w2"}
    await warmer.sync()
    now_s = 11.0
    assert workers.pinned == {"w1": template_keys(rig)}
    workers.unreachable = set()
    workers.members = (*workers.members, workers.life("w3"))
    await warmer.sync()
    assert workers.pinned == dict.fromkeys(("w1", "w2", "w3"), template_keys(rig))
    num_calls = len(workers.calls)
    await warmer.sync()
    assert len(workers.calls) == num_calls, "nothing to do"
    workers.members = (workers.life("w1", "2"),)
    workers.pinned.clear()
    await warmer.sync()
    assert workers.pinned == {"w1": template_keys(rig)}, "a restarted worker is a new one"
    assert len(template_keys(rig)) >= 3


async def test_a_worker_without_templates_is_told_to_take_traffic(rig: PromptRig) -> None:
    workers = PinningWorkers("w1")
    await TemplateWarmer(rig.catalog, rig.keyer, workers, "m").sync()
    assert workers.calls[-1] == WarmUp(())


async def test_after_rollover_the_new_date_is_pinned_and_the_old_one_is_not(rig: PromptRig) -> None:
    """What stands before the date stays where it is; between the two, what lies behind it is a miss."""
    workers = PinningWorkers("w1")
    warmer = TemplateWarmer(rig.catalog, rig.keyer, workers, "m")
    rig.put(CLOCKED)
    await warmer.sync()
    old = template_keys(rig)
    assert workers.pinned["w1"] == old
    rig.clock.now = datetime(2026, 4, 1, 0, 0, 1)
    granted = template_keys(rig)
    assert 0 < len(granted) < len(old)
    assert granted == old[: len(granted)], "until it is rewarmed, nothing that no worker holds is granted"
    await warmer.sync()
    new = template_keys(rig)
    assert workers.pinned["w1"] == new
    assert set(old) & set(new) == set(granted)
    assert len(new) > len(granted)


async def test_pins_of_a_template_that_went_while_no_gateway_looked_are_given_back(
    rig: PromptRig, tmp_path: Path, sandbox: TemplateSandbox
) -> None:
    workers = PinningWorkers("w1")
    rig.put(STATIC)
    rig.put(f"Another. {STATIC}", template_id="u")
    await TemplateWarmer(rig.catalog, rig.keyer, workers, "m").sync()
    kept = template_keys(rig)
    assert len(workers.pinned["w1"]) > len(kept)
    rig.catalog.delete(TenantId("acme"), "u")
    restarted = PromptRig(tmp_path, sandbox=sandbox)
    await TemplateWarmer(restarted.catalog, restarted.keyer, workers, "m").sync()
    assert workers.pinned["w1"] == kept
