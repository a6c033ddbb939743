"""A Redis client that can be slow, dead or cancelled without harm to its caller.

Every call has a deadline and passes a circuit breaker. A call that its caller abandons (deadline, cancellation) runs on
by itself until the socket timeout, so that no connection goes back to the pool with a reply unread: what made one
user's data appear in another's session elsewhere. Calls in flight are bounded; beyond that they fail at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from cache_service.breaker import CircuitBreaker
from cluster.api.errors import UnavailableError

Command = tuple[Any, ...]

_SCHEMES = (
    "redis://, rediss://, unix://, redis+sentinel://host:port,host:port/master[/db], redis+cluster://host:port "
    "(rediss+sentinel:// and rediss+cluster:// with TLS)"
)


class RedisUnavailableError(UnavailableError):
    """Redis did not answer in time, refused, or is known to be down. Never names addresses, keys or values."""

    default_code = "index_unavailable"


@dataclass(frozen=True, slots=True)
class RedisLimits:
    """`deadline_s` per call on the request path; `socket_timeout_s` until an abandoned call is given up."""

    deadline_s: float = 0.05
    slow_deadline_s: float = 5.0
    socket_timeout_s: float = 10.0
    max_in_flight: int = 16

    def __post_init__(self) -> None:
        for name in ("deadline_s", "slow_deadline_s", "socket_timeout_s"):
            if not 0 < getattr(self, name) <= 600:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed are more than 0 up to 600 seconds")
        if not 1 <= self.max_in_flight <= 1024:
            raise ValueError(f"max_in_flight is {self.max_in_flight}, allowed are 1 to 1024")


def connect(url: str, limits: RedisLimits) -> Redis | RedisCluster:
    """A client for any of the schemes above; connects lazily. Raises ValueError for another scheme."""
    options: dict[str, Any] = {
        "socket_timeout": limits.socket_timeout_s,
        "socket_connect_timeout": limits.socket_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": limits.max_in_flight + 1,
        "protocol": 2,
    }
    scheme = urlsplit(url).scheme
    if scheme.endswith("+sentinel"):
        return _connect_sentinel(url, options)
    if scheme.endswith("+cluster"):
        return RedisCluster.from_url(url.replace("+cluster", "", 1), **options)
    if scheme not in ("redis", "rediss", "unix"):
        raise ValueError(f"Redis URL has scheme {scheme!r}, allowed are {_SCHEMES}")
    return Redis.from_url(url, **options)


def _connect_sentinel(url: str, options: dict[str, Any]) -> Redis:
    parts = urlsplit(url)
    base, _, query = url.partition("?")
    credentials, _, hosts = base.split("://", 1)[1].partition("/")[0].rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service or not hosts:
        raise ValueError(f"Sentinel URL lacks hosts or the master's name, allowed are {_SCHEMES}")
    scheme = parts.scheme.removesuffix("+sentinel")
    login = f"{credentials}@" if credentials else ""
    parsed: dict[str, Any] = dict(parse_url(f"{scheme}://{login}master/{database}{'?' if query else ''}{query}"))
    sentinel_password = parsed.pop("sentinel_password", None)
    for unused in ("host", "port"):
        parsed.pop(unused, None)
    if parsed.pop("connection_class", None) is not None:
        parsed["ssl"] = True
    sentinel_options = {name: options[name] for name in ("socket_timeout", "socket_connect_timeout", "retry")}
    if sentinel_password:
        sentinel_options["password"] = sentinel_password
    addresses = [_split_address(host) for host in hosts.split(",")]
    sentinel = Sentinel(addresses, sentinel_kwargs=sentinel_options | _tls_only(parsed), **(options | parsed))
    return sentinel.master_for(service)


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host else (port, 26379)


def _tls_only(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith("ssl")}


class GuardedRedis:
    """Runs pipelines of commands against `url`. Belongs to one event loop; close it with `aclose`."""

    def __init__(self, url: str, limits: RedisLimits | None = None, breaker: CircuitBreaker | None = None) -> None:
        self.limits = limits or RedisLimits()
        self.breaker = breaker or CircuitBreaker()
        self._client = connect(url, self.limits)
        self._tasks: set[asyncio.Task[list[Any]]] = set()
        self._too_late: set[asyncio.Task[list[Any]]] = set()  # already counted as failures

    @property
    def num_in_flight(self) -> int:
        return len(self._tasks)

    async def run(self, commands: Sequence[Command], deadline_s: float | None = None) -> list[Any]:
        """Replies in order. Raises RedisUnavailableError when any command fails or the deadline passes."""
        if len(self._tasks) >= self.limits.max_in_flight:
            raise RedisUnavailableError(f"{len(self._tasks)} index calls are in flight, allowed are no more")
        if not self.breaker.may_call():
            raise RedisUnavailableError("the index is known to be down")
        task = asyncio.create_task(self._pipeline(commands))
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        # Unlike wait_for, wait leaves the task alone when this caller is cancelled or the time is over.
        done, _ = await asyncio.wait({task}, timeout=deadline_s or self.limits.deadline_s)
        if not done:
            self._too_late.add(task)
            self.breaker.failed()
            raise RedisUnavailableError("the index did not answer in time")
        error = task.exception()
        if error is None:
            return task.result()
        # No node of a cluster answers: not among the client's other errors.
        if isinstance(error, RedisError | RedisClusterException | OSError | TimeoutError | asyncio.IncompleteReadError):
            raise RedisUnavailableError(f"the index failed with {type(error).__name__}") from None
        raise error

    async def run_slow(self, commands: Sequence[Command]) -> list[Any]:
        """For work off the request path: the longer deadline."""
        return await self.run(commands, self.limits.slow_deadline_s)

    async def aclose(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _pipeline(self, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            return [await self._client.execute_command(*commands[0])]
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = await pipeline.execute()
        return replies

    def _finished(self, task: asyncio.Task[list[Any]]) -> None:
        self._tasks.discard(task)
        is_failure = task.cancelled() or task.exception() is not None
        if task in self._too_late:
            self._too_late.remove(task)
        elif is_failure:
            self.breaker.failed()
        else:
            self.breaker.succeeded()
