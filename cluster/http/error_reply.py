"""Any error -> status, headers and body in OpenAI's shape. Foreign exceptions become an opaque 500."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import Response

from cluster.api.errors import InternalError, WatchwordError
from cluster.errors_table import row_of
from cluster.http.protocol_errors import HttpRefusal
from cluster.openai.json_text import to_json_bytes


def error_body(error: WatchwordError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": row_of(error).openai_type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_status(error: WatchwordError) -> int:
    return error.status if isinstance(error, HttpRefusal) else row_of(error).http_status


def error_response(error: WatchwordError) -> Response:
    return Response(
        to_json_bytes(error_body(error)),
        status_code=error_status(error),
        headers=_headers(error),
        media_type="application/json",
    )


def hide(error: BaseException) -> WatchwordError:
    """The error itself if it was raised on purpose, else one that says nothing: details belong in our log."""
    if isinstance(error, WatchwordError):
        return error
    return InternalError("an internal error occurred; give the x-request-id when you report it")


def _headers(error: WatchwordError) -> dict[str, str]:
    status = error_status(error)
    headers = {"x-should-retry": str(row_of(error).should_retry).lower()}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if isinstance(error, HttpRefusal):
        headers.update(error.headers)
    return headers
