"""Checks chat messages and brings them to the one form that templates know: text content, known roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.api.errors import InvalidRequestError, UnsupportedError

MAX_DEPTH = 32
ROLES = ("system", "developer", "user", "assistant", "tool")


def normalize_messages(messages: Sequence[Mapping[str, Any]], *, param: str = "messages") -> list[dict[str, Any]]:
    """Copies with `content` as text. Raises InvalidRequestError that names the field at fault."""
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(f"{param} must be an array of messages, got {_kind(messages)}", param=param)
    return [_normalize(message, f"{param}[{index}]") for index, message in enumerate(messages)]


def _normalize(message: Any, param: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{param} must be an object, got {_kind(message)}", param=param)
    role = message.get("role")
    if role not in ROLES:
        shown = repr(role)[:40]
        raise InvalidRequestError(f"{param}.role must be one of {', '.join(ROLES)}; got {shown}", param=f"{param}.role")
    normalized = {key: value for key, value in message.items() if value is not None}
    if not _is_shallow(normalized, MAX_DEPTH):
        raise InvalidRequestError(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)
    has_calls = role == "assistant" and bool(message.get("tool_calls"))
    normalized["content"] = _text(message.get("content"), f"{param}.content", may_be_absent=has_calls)
    return normalized


def _text(content: Any, param: str, *, may_be_absent: bool) -> str:
    if isinstance(content, str):
        return checked_unicode(content, param)
    if content is None and may_be_absent:
        return ""
    if isinstance(content, list | tuple):
        return "".join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))
    raise InvalidRequestError(f"{param} must be a string or an array of text parts, got {_kind(content)}", param=param)


def _part(part: Any, param: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{param} must be an object, got {_kind(part)}", param=param)
    kind = part.get("type")
    if kind != "text":
        shown = repr(kind)[:40]
        raise UnsupportedError(f"{param}.type {shown} is not supported; only text parts are", param=f"{param}.type")
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(
            f"{param}.text must be a string, got {_kind(part.get('text'))}", param=f"{param}.text"
        )
    return checked_unicode(part["text"], f"{param}.text")


def checked_unicode(text: str, param: str) -> str:
    """Refuses lone surrogates, which no tokenizer and no UTF-8 answer can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} is not valid Unicode: lone surrogate at character {error.start}", param=param
        ) from None
    return text


def _is_shallow(value: Any, levels: int) -> bool:
    if not isinstance(value, Mapping | list | tuple):
        return True
    items = value.values() if isinstance(value, Mapping) else value
    return levels > 0 and all(_is_shallow(item, levels - 1) for item in items)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
