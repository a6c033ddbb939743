"""The one table from Watchword's errors to what each transport says. A test fails when a class has no row."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api import errors


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """`grpc_status` is the name of a grpc.StatusCode. `should_retry` tells OpenAI's clients (x-should-retry)."""

    http_status: int
    openai_type: str
    grpc_status: str
    should_retry: bool = False


ERROR_TABLE: dict[type[errors.WatchwordError], ErrorRow] = {
    errors.WatchwordError: ErrorRow(500, "server_error", "INTERNAL"),
    errors.InvalidRequestError: ErrorRow(400, "invalid_request_error", "INVALID_ARGUMENT"),
    errors.ContextLengthError: ErrorRow(400, "invalid_request_error", "INVALID_ARGUMENT"),
    errors.UnsupportedError: ErrorRow(400, "invalid_request_error", "UNIMPLEMENTED"),
    errors.AuthenticationError: ErrorRow(401, "authentication_error", "UNAUTHENTICATED"),
    errors.PermissionDeniedError: ErrorRow(403, "permission_error", "PERMISSION_DENIED"),
    errors.NotFoundError: ErrorRow(404, "invalid_request_error", "NOT_FOUND"),
    errors.RateLimitedError: ErrorRow(429, "rate_limit_error", "RESOURCE_EXHAUSTED", should_retry=True),
    errors.OverloadedError: ErrorRow(503, "server_error", "UNAVAILABLE", should_retry=True),
    errors.UnavailableError: ErrorRow(503, "server_error", "UNAVAILABLE", should_retry=True),
    errors.WorkerLostError: ErrorRow(502, "server_error", "UNAVAILABLE", should_retry=True),
    errors.DeadlineExceededError: ErrorRow(504, "timeout_error", "DEADLINE_EXCEEDED"),
    errors.RequestAbortedError: ErrorRow(499, "request_aborted", "CANCELLED"),
    errors.InternalError: ErrorRow(500, "server_error", "INTERNAL"),
}


def row_of(error: WatchwordErrorOrClass) -> ErrorRow:
    """The row of the nearest class that has one."""
    kind = error if isinstance(error, type) else type(error)
    return next(ERROR_TABLE[base] for base in kind.__mro__ if base in ERROR_TABLE)


WatchwordErrorOrClass = errors.WatchwordError | type[errors.WatchwordError]
