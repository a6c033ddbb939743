"""What travels on the one stream between a gateway and the router: questions and news upwards, answers downwards."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.errors import WatchwordError
from cluster.api.ids import RequestId, WorkerId
from cluster.api.routing import RouteDecision, RouteQuery

SERVICE = "watchword.internal.RouterChannel"
METHOD_OPEN = f"/{SERVICE}/Open"


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """Where one life (epoch) of the router listens."""

    address: str
    epoch: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Answered once, when the request's turn in the queue has come, unless it is withdrawn before."""

    query: RouteQuery


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody waits for the answer any more, whether or not there is one already."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class FirstToken:
    request_id: RequestId
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Release:
    request_id: RequestId
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    worker_id: WorkerId
    epoch: str


Note = FirstToken | Release | WorkerFailed


@dataclass(frozen=True, slots=True)
class Notes:
    """In order. Nobody waits for their effect."""

    notes: tuple[Note, ...]


Command = Ask | Withdraw | Notes


@dataclass(frozen=True, slots=True)
class Answer:
    """Either a decision or why there is none."""

    request_id: RequestId
    decision: RouteDecision | None = None
    error: WatchwordError | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """The first one is empty: the stream is open."""

    answers: tuple[Answer, ...]
