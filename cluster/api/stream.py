"""What all streams between processes of ours have in common: who is let in, and when silence counts as loss.

Their messages are pickles, so nothing is read of a peer that has not shown the token.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable
from typing import Generic, TypeVar

TOKEN_METADATA = "x-watchword-token"
EPOCH_METADATA = "x-watchword-epoch"

_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A peer that a network cut hides answers no ping: its streams end after 10 s at the latest.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the one that counts in current gRPC; its default is a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # a gateway that only listens may go on asking
)
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)
CLIENT_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """The server's side of one peer's stream: what waits for the peer, merged into one message while it is slow."""

    def __init__(self) -> None:
        self.pending: list[Item] = []
        self.is_closed = False
        self._ready = asyncio.Event()

    def push(self, *items: Item) -> None:
        """Without items: the next message goes out at once, even if it is empty."""
        self.pending.extend(items)
        self._ready.set()

    def close(self) -> None:
        self.is_closed = True
        self._ready.set()

    async def next(self) -> tuple[Item, ...]:
        await self._ready.wait()
        items, self.pending = tuple(self.pending), []
        self._ready.clear()
        return items


def pass_of(token: str, epoch: str) -> tuple[tuple[str, str], ...]:
    """The metadata with which a gateway opens a stream to one life of a server."""
    return ((TOKEN_METADATA, token), (EPOCH_METADATA, epoch))


def is_token(metadata: Iterable[tuple[str, str | bytes]] | None, token: str) -> bool:
    shown = str(dict(metadata or ()).get(TOKEN_METADATA, ""))
    return hmac.compare_digest(shown.encode(), token.encode())


def is_epoch(metadata: Iterable[tuple[str, str | bytes]] | None, epoch: str) -> bool:
    """Whether the peer means this life of the server and not an earlier one that had the same address."""
    return dict(metadata or ()).get(EPOCH_METADATA) == epoch
