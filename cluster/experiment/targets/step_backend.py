"""A backend over an engine whose steps are taken by hand: the same arrivals give the same steps, every time.

The only key for handing outputs out is the request id, which is never reused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from cluster.api.ids import RequestId
from cluster.api.output import RequestOutput
from cluster.api.request import Request
from cluster.backend import Placement


class SteppedEngine(Protocol):
    """What the backend needs of an engine."""

    step_id: int

    @property
    def has_work(self) -> bool: ...
    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: RequestId) -> None: ...
    def step(self) -> list[RequestOutput]: ...


@dataclass(slots=True)
class Mailbox:
    """Outputs of one request that its consumer has not taken yet."""

    request_id: RequestId
    outputs: asyncio.Queue[RequestOutput] = field(default_factory=asyncio.Queue)
    is_waited_on: bool = False

    @property
    def is_settled(self) -> bool:
        return self.is_waited_on and self.outputs.empty()


class Mailboxes:
    """Who gets which output."""

    def __init__(self) -> None:
        self._open: dict[RequestId, Mailbox] = {}

    def open(self, request_id: RequestId) -> Mailbox:
        assert request_id not in self._open, "request ids are never reused"
        mailbox = self._open[request_id] = Mailbox(request_id)
        return mailbox

    def close(self, request_id: RequestId) -> None:
        self._open.pop(request_id, None)

    def deliver(self, output: RequestOutput) -> None:
        mailbox = self._open.get(output.request_id)
        if mailbox is not None:  # a late output of a finished request finds nobody
            mailbox.outputs.put_nowait(output)

    @property
    def are_settled(self) -> bool:
        """Every consumer waits for the next step."""
        return all(mailbox.is_settled for mailbox in self._open.values())


class StepBackend:
    """Implements cluster.backend.Backend. `steps` records which requests got tokens in which step."""

    def __init__(self, engine: SteppedEngine, mailboxes: Mailboxes | None = None) -> None:
        self.engine = engine
        self.mailboxes = mailboxes or Mailboxes()
        self.made: dict[RequestId, list[RequestOutput]] = {}
        self.delivered: dict[RequestId, list[RequestOutput]] = {}
        self.steps: list[frozenset[RequestId]] = []
        self.step_ids: dict[RequestId, list[int]] = {}  # of each output in `made`

    async def is_ready(self) -> bool:
        return True

    async def generate(
        self, request: Request, *, affinity_key: str | None = None, placement: Placement | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        request_id = request.request_id
        mailbox = self.mailboxes.open(request_id)
        self.made[request_id] = []
        self.step_ids[request_id] = []
        delivered = self.delivered[request_id] = []
        finished = False
        try:
            self.engine.add_request(request)
            while not finished:
                mailbox.is_waited_on = True
                output = await mailbox.outputs.get()
                mailbox.is_waited_on = False
                delivered.append(output)
                finished = output.finished
                yield output
        finally:
            self.mailboxes.close(request_id)
            if not finished:
                self.engine.abort(request_id)

    def step(self) -> None:
        outputs = self.engine.step()
        self.steps.append(frozenset(output.request_id for output in outputs if output.deltas))
        for output in outputs:
            if output.request_id in self.made:
                self.made[output.request_id].append(output)
                self.step_ids[output.request_id].append(self.engine.step_id)
            self.mailboxes.deliver(output)

    async def settle(self) -> None:
        """Lets every consumer take what was delivered, so that the next step finds them all waiting."""
        await asyncio.sleep(0)
        while not self.mailboxes.are_settled:  # noqa: ASYNC110 - gives the consumers their turn, does not poll in time
            await asyncio.sleep(0)

    def forget(self) -> None:
        """Drops the records of finished rounds."""
        self.made.clear()
        self.delivered.clear()
        self.steps.clear()
        self.step_ids.clear()
