"""What travels on the one stream between a gateway and a worker.

Upwards single commands, downwards whole steps: all news of one step for all requests of that gateway in one message,
because the cost of a message is what limits token streams (measured: docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.ids import RequestId
from cluster.api.output import RequestOutput
from cluster.api.request import Request

SERVICE = "watchword.internal.WorkerChannel"
METHOD_OPEN = f"/{SERVICE}/Open"
TOKEN_METADATA = "x-watchword-token"
EPOCH_METADATA = "x-watchword-epoch"


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
