"""What travels on the one stream between a gateway and a worker.

Upwards single commands, downwards whole steps: all news of one step for all requests of that gateway in one message,
because the cost of a message is what limits token streams (measured: docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.ids import BlockKey, RequestId
from cluster.api.output import RequestOutput
from cluster.api.request import Request

SERVICE = "watchword.internal.WorkerChannel"
METHOD_OPEN = f"/{SERVICE}/Open"
METHOD_CONTROL = f"/{SERVICE}/Control"


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: tuple[RequestId, ...]


Command = Submit | Abort


@dataclass(frozen=True, slots=True)
class Outputs:
    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run these prompts so that the worker pins their blocks. `is_complete`: then it takes traffic, although more may
    come. Answer: blocks pinned."""

    requests: tuple[Request, ...]
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class KeepPins:
    """Of the pinned blocks only these stay pinned, the others may be evicted again. Answer: blocks unpinned.

    It names what stays and not what goes, so that a gateway that has just started need not know what was pinned before.
    """

    keys: frozenset[BlockKey]


@dataclass(frozen=True, slots=True)
class PurgeUser:
    """End all reuse of what is cached for this user. Answer: blocks removed."""

    user_hash: bytes


@dataclass(frozen=True, slots=True)
class AuditCache:
    """What is cached, to compare with the index. Answer: number of blocks << 64 | XOR of their keys' first 64 bits."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Share nothing any more, end what runs, take no new work, keep the event log. Answer: 1, or 0 when it was before.

    `reason` holds no text and no raw identity: it is logged and shown to operators.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class SetMaxNumSeqs:
    """Sequences that may run together from the next step on. Answer: the number."""

    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened to the blocks that these requests touched. Answer: a tuple of TracedEvent, oldest first."""

    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Read a LoRA adapter and let requests name it; what went by the name before is replaced. Answer: the digest of its
    content, or text: why not. With `expected_digest`, other content is refused."""

    name: str
    folder: str  # below the one that the worker was told to allow
    expected_digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Answer: 1, or 0 when no adapter went by the name. Requests that run with it go on."""

    name: str


@dataclass(frozen=True, slots=True)
class Inspect:
    """Answer: WorkerEvidence."""


@dataclass(frozen=True, slots=True)
class AuditLayout:
    """Run rows of known tokens in changing company through the model runner. Answer: LayoutEvidence."""


ControlCall = (
    WarmUp
    | KeepPins
    | PurgeUser
    | AuditCache
    | Quarantine
    | SetMaxNumSeqs
    | Trace
    | LoadAdapter
    | UnloadAdapter
    | Inspect
    | AuditLayout
)
