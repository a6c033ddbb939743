"""Faults on the way from tokens to the caller: detokenizing, and who gets which output."""

from __future__ import annotations

import itertools
from dataclasses import replace

from cluster.api.ids import RequestId
from cluster.api.output import RequestOutput
from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.targets.step_backend import Mailbox, Mailboxes
from cluster.serving.token_table import TokenTable

_NUM_IDS = 3


class SharedPending(TokenTable):
    """Bytes of an unfinished character wait in the table for whichever request comes next."""

    def __init__(self, table: TokenTable) -> None:
        ids = range(len(table))
        super().__init__(map(table.bytes_of, ids), filter(table.is_special, ids))
        self._pending = b""

    def text_of(self, token_id: int) -> str:
        return super().bytes_of(token_id).decode("utf-8", errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        data = self._pending + super().bytes_of(token_id)
        num_whole = _num_whole(data)
        self._pending = data[num_whole:]
        return data[:num_whole]


def _num_whole(data: bytes) -> int:
    """Length without an unfinished character at the end."""
    for num_cut in range(min(4, len(data) + 1)):
        try:
            data[: len(data) - num_cut].decode()
        except UnicodeDecodeError:
            continue
        return len(data) - num_cut
    return len(data)


class DelayedByOne(SharedPending):
    """Each token's text is held back until the next token comes, whichever request that one belongs to."""

    def bytes_of(self, token_id: int) -> bytes:
        data, self._pending = self._pending, TokenTable.bytes_of(self, token_id)
        return data


class ReusedIds(Mailboxes):
    """On the wire requests are numbered modulo a small number: a new one takes over a number that is still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._serials = itertools.count()
        self._number_of: dict[RequestId, int] = {}
        self._mailbox_of: dict[int, Mailbox] = {}

    def open(self, request_id: RequestId) -> Mailbox:
        mailbox = super().open(request_id)
        number = self._number_of[request_id] = next(self._serials) % _NUM_IDS
        self._mailbox_of[number] = mailbox
        return mailbox

    def deliver(self, output: RequestOutput) -> None:
        mailbox = self._mailbox_of[self._number_of[output.request_id]]
        mailbox.outputs.put_nowait(replace(output, request_id=mailbox.request_id))


FAULTS = (
    Fault(
        "detokenizer_state_shared",
        Component.DETOKENIZER,
        "unfinished characters wait for any request",
        lambda: StackParts(token_table=SharedPending),
    ),
    Fault(
        "detokenizer_lookahead_shared",
        Component.DETOKENIZER,
        "text is held back for any request",
        lambda: StackParts(token_table=DelayedByOne),
    ),
    Fault(
        "stream_after_id_reuse",
        Component.STREAM,
        "ids are reused while their requests live",
        lambda: StackParts(mailboxes=ReusedIds),
    ),
)
