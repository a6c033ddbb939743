"""The outermost layer: every request passes here for its id, its credential, its error shape and its log line.

Deny by default: a path that is not in OPEN_PATHS needs a credential, whether it exists or not.
"""

from __future__ import annotations

import logging
import re
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.errors import AuthenticationError, RequestAbortedError, WatchwordError
from cluster.api.ids import new_request_id
from cluster.auth.authenticator import Authenticator
from cluster.http.error_reply import error_response, hide
from cluster.http.protocol_errors import HttpRefusal
from cluster.metrics import HttpMetrics

OPEN_PATHS = frozenset({"/health", "/ready", "/-/healthz"})

access_log = logging.getLogger("watchword.access")
error_log = logging.getLogger("watchword.http")

# What a client may call its request: echoed to it, used for nothing else.
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Front:
    """ASGI. Puts `request_id` and `principal` into scope["state"] of every request that it lets through."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, metrics: HttpMetrics) -> None:
        self._app = app
        self._authenticator = authenticator
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        try:
            await self._serve(scope, receive, exchange)
        finally:
            self._note(scope, exchange)

    async def _serve(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        try:
            if scope["path"] not in OPEN_PATHS:
                principal = self._authenticator.authenticate(_credential(scope))
                scope["state"]["principal"] = principal
                exchange.key_id = principal.key_id
            await self._app(scope, receive, exchange.send)
        except Exception as error:
            await self._answer(error, scope, receive, exchange)

    async def _answer(self, error: Exception, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        shown = _translate(error, scope)
        if not isinstance(error, WatchwordError | HTTPException | ClientDisconnect):
            _log_bug(error, exchange.request_id)
        if exchange.status is not None or isinstance(shown, RequestAbortedError):
            # Too late for an answer, or nobody is there to read one.
            exchange.status = exchange.status or 499
            return
        await error_response(shown)(scope, receive, exchange.send)

    def _note(self, scope: Scope, exchange: _Exchange) -> None:
        # The route, not the path: a path may hold a user's name.
        route = exchange.route(scope)
        elapsed_s = time.monotonic() - exchange.started_s
        self._metrics.answered(route, exchange.status or 499)
        if route not in OPEN_PATHS:
            access_log.info(
                "%s %s %s %.1f ms key=%s request=%s",
                scope["method"] if scope["method"].isalpha() else "?",
                route,
                exchange.status or 499,
                elapsed_s * 1000,
                exchange.key_id,
                exchange.request_id,
            )


def _credential(scope: Scope) -> str | None:
    """Of two, a proxy may have checked the other one."""
    values = Headers(scope=scope).getlist("authorization")
    if len(values) > 1:
        raise AuthenticationError("the header authorization was sent more than once")
    return values[0] if values else None


class _Exchange:
    """One request's answer on its way out."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.request_id = new_request_id()
        self.started_s = time.monotonic()
        self.status: int | None = None
        self.key_id = "-"
        self._send = send
        given = Headers(scope=scope).get("x-request-id", "")
        self._shown_id = given if _SANE_ID.fullmatch(given) else self.request_id
        scope.setdefault("state", {})["request_id"] = self.request_id

    def route(self, scope: Scope) -> str:
        route = scope.get("route")
        return "unmatched" if route is None else str(route.path)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._shown_id
            headers["x-watchword-request-id"] = self.request_id
        await self._send(message)


def _translate(error: Exception, scope: Scope) -> WatchwordError:
    if isinstance(error, ClientDisconnect):
        return RequestAbortedError("the client went away")
    if not isinstance(error, HTTPException):
        return hide(error)
    if error.status_code == 404:
        return HttpRefusal(404, "there is nothing at this path", "unknown_path")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        methods = ", ".join(sorted(part.strip() for part in allowed.split(",")))
        return HttpRefusal(405, f"this path answers {methods}", "method_not_allowed", headers={"allow": methods})
    return HttpRefusal(error.status_code, "the request could not be read", "bad_request")


def _log_bug(error: Exception, request_id: str) -> None:
    """Where it happened, not what it said: an exception's text may quote a prompt."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = "?" if frame is None else f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
    error_log.error("%s at %s request=%s", type(error).__name__, where, request_id)
