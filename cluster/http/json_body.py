"""Reads a JSON object from a request body: bounded in size and time, strict UTF-8; no NaN, lone surrogates or NUL."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from cluster.api.errors import InvalidRequestError
from cluster.http.config import HttpConfig
from cluster.http.protocol_errors import HttpRefusal

# Only an escape can bring in what UTF-8 cannot hold (a lone surrogate) or a raw JSON string may not (NUL).
_ESCAPE = b"\\u"
_MAX_PATH_CHARS = 80


async def read_json(request: Request, config: HttpConfig) -> dict[str, Any]:
    """Raises HttpRefusal (408, 413, 415) or InvalidRequestError; never quotes the body."""
    _check_content_type(request.headers.get("content-type"))
    try:
        async with asyncio.timeout(config.body_timeout_s):
            raw = await _read_bounded(request, config.max_body_bytes)
    except TimeoutError:
        raise _too_slow(config.body_timeout_s) from None
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    return body


def parse_json(raw: bytes) -> Any:
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError:
        raise InvalidRequestError("the body is not valid UTF-8", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}", code="invalid_json"
        ) from None
    except ValueError as error:
        if isinstance(error, _RefusedJson):
            raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
        raise InvalidRequestError("the body holds a number with too many digits", code="invalid_json") from None
    if _ESCAPE in raw:
        _check_text(body)
    return body


class _RefusedJson(ValueError):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedJson(f"{name} is no number")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A proxy that checked the first `user` and a server that reads the last would disagree on who is asking."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _RefusedJson("a name stands twice in one object")
    return found


def _check_content_type(content_type: str | None) -> None:
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpRefusal(415, "the content type must be application/json", "unsupported_media_type")


async def _read_bounded(request: Request, max_body_bytes: int) -> bytes:
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > max_body_bytes:
        raise _too_large(max_body_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_body_bytes:
            raise _too_large(max_body_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_slow(body_timeout_s: float) -> HttpRefusal:
    return HttpRefusal(
        408,
        f"the body was not there after {body_timeout_s:g} s",
        "body_too_slow",
        headers={"connection": "close"},
    )


def _too_large(max_body_bytes: int) -> HttpRefusal:
    return HttpRefusal(
        413, f"the body is larger than {max_body_bytes} bytes", "body_too_large", headers={"connection": "close"}
    )


def _check_text(body: Any) -> None:
    """Walks the whole body, names included; a loop, because the parser allows more depth than Python's stack."""
    waiting: list[tuple[Any, str]] = [(body, "")]
    while waiting:
        value, where = waiting.pop()
        if isinstance(value, str):
            _check_string(value, where)
        elif isinstance(value, list):
            waiting.extend((item, f"{where[:_MAX_PATH_CHARS]}[{index}]") for index, item in enumerate(value))
        elif isinstance(value, dict):
            for name, item in value.items():
                _check_string(name, where)
                waiting.append((item, f"{where[:_MAX_PATH_CHARS]}.{name}" if where else name))


def _check_string(text: str, where: str) -> None:
    if "\0" in text:
        raise InvalidRequestError(f"{where or 'the body'} holds a NUL character", param=where or None)
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise InvalidRequestError(f"{where or 'the body'} holds a lone surrogate", param=where or None)
