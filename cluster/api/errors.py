"""The errors that Watchword raises on purpose, as one tree.

    WatchwordError
    ├── InvalidRequestError        the caller's fault, 400
    │   ├── ContextLengthError     prompt plus max_tokens exceed the model's context
    │   └── UnsupportedError       a known field or feature that is not built
    ├── AuthenticationError        401
    ├── PermissionDeniedError      403
    ├── NotFoundError              404
    ├── RateLimitedError           429, carries retry_after_s
    ├── OverloadedError            503, carries retry_after_s
    ├── UnavailableError           503, no worker can answer
    ├── WorkerLostError            the worker died and no equal one could resume, 502
    ├── DeadlineExceededError      504
    ├── RequestAbortedError        the caller went away, 499
    └── InternalError              a bug of ours; its message never holds details

Every error survives pickling: all state lives in `args`-free attributes restored by `__reduce__`.
Messages are written for the caller: they name the value and the allowed range, never another user's data.
"""

from __future__ import annotations

from typing import Any


class WatchwordError(Exception):
    """Root of the tree. `code` is a stable slug for machines, `param` the request field at fault."""

    default_code = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.param, self.code, self.retry_after_s)


def _rebuild(
    kind: type[WatchwordError], message: str, param: str | None, code: str, retry_after_s: float | None
) -> WatchwordError:
    return kind(message, param=param, code=code, retry_after_s=retry_after_s)


class InvalidRequestError(WatchwordError):
    default_code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    default_code = "context_length_exceeded"


class UnsupportedError(InvalidRequestError):
    default_code = "unsupported"


class AuthenticationError(WatchwordError):
    default_code = "invalid_api_key"


class PermissionDeniedError(WatchwordError):
    default_code = "permission_denied"


class NotFoundError(WatchwordError):
    default_code = "not_found"


class RateLimitedError(WatchwordError):
    default_code = "rate_limit_exceeded"


class OverloadedError(WatchwordError):
    default_code = "overloaded"


class UnavailableError(WatchwordError):
    default_code = "unavailable"


class WorkerLostError(WatchwordError):
    default_code = "worker_lost"


class DeadlineExceededError(WatchwordError):
    default_code = "deadline_exceeded"


class RequestAbortedError(WatchwordError):
    default_code = "request_aborted"


class InternalError(WatchwordError):
    default_code = "internal_error"
