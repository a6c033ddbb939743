"""What a worker answers arrives as it was, over the real channel."""

from __future__ import annotations

from typing import Any

import pytest
from dispatch_rig import TOKEN, ScriptedEngine

from cluster.api.channel import AuditCache
from cluster.api.errors import UnavailableError
from cluster.api.ids import WorkerId
from cluster.api.worker_state import WorkerInfo
from cluster.control_client import ControlClient
from workers.channel import WorkerChannel


class Members:
    def __init__(self, *members: WorkerInfo) -> None:
        self.members = members


async def _ask(answer: object, epoch: str = "epoch") -> Any:
    async def control(_call: object) -> object:
        return answer

    channel = WorkerChannel(ScriptedEngine(0.01), control, TOKEN, "epoch", "127.0.0.1")
    address = await channel.start()
    try:
        worker = WorkerInfo(WorkerId("w0"), epoch, address, "m", "n", 16, 8, 8, 512)
        return await ControlClient(Members(worker), TOKEN).call(worker, AuditCache())
    finally:
        await channel.stop(0)


@pytest.mark.parametrize("answer", [0, 7, b"\x00digest", "text that says why not", None, ("a", b"b"), True])
async def test_an_answer_keeps_its_kind(answer: object) -> None:
    found = await _ask(answer)
    assert (type(found), found) == (type(answer), answer)


async def test_another_life_of_the_worker_does_not_answer() -> None:
    with pytest.raises(UnavailableError):
        await _ask(1, epoch="earlier")
