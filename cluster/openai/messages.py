"""Chat messages on the wire -> messages for a template. Text only; other parts are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.api.errors import InvalidRequestError, UnsupportedError
from cluster.openai.wire import json_name

_ROLES = ("system", "developer", "user", "assistant")
_UNBUILT_ROLES = ("tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_UNBUILT_MESSAGE_FIELDS = ("tool_calls", "function_call", "audio", "tool_call_id")


def parse_messages(messages: object, *, param: str, may_be_empty: bool = False) -> list[dict[str, Any]]:
    """Raises InvalidRequestError or UnsupportedError that names the part at fault, e.g. messages[1].content[0]."""
    if not isinstance(messages, list):
        raise InvalidRequestError(f"{param} must be a list, got {json_name(messages)}", param=param)
    if not messages and not may_be_empty:
        raise InvalidRequestError(f"{param} is empty: at least 1 message is needed", param=param)
    return [_parse_message(message, f"{param}[{index}]") for index, message in enumerate(messages)]


def _parse_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be an object, got {json_name(message)}", param=where)
    role = message.get("role")
    if role in _UNBUILT_ROLES:
        raise UnsupportedError(f"{where}.role {role!r} is not supported yet", param=f"{where}.role")
    if role not in _ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    for field in _UNBUILT_MESSAGE_FIELDS:
        if message.get(field):
            raise UnsupportedError(f"{where}.{field} is not supported yet", param=f"{where}.{field}")
    # Models' templates know "system"; "developer" is OpenAI's newer word for the same thing.
    parsed: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _parse_content(message.get("content"), f"{where}.content"),
    }
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise InvalidRequestError(f"{where}.name must be a string, got {json_name(name)}", param=f"{where}.name")
        parsed["name"] = name
    return parsed


def _parse_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(_parse_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    raise InvalidRequestError(
        f"{where} must be a string or a list of text parts, got {json_name(content)}", param=where
    )


def _parse_part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{where} must be an object, got {json_name(part)}", param=where)
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        shown = repr(kind)[:40] if isinstance(kind, str) else json_name(kind)
        raise UnsupportedError(f"{where}.type {shown} is not supported, only text is", param=f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text must be a string, got {json_name(text)}", param=f"{where}.text")
    return text


def parse_prompts(prompt: object) -> list[str | Sequence[int]]:
    """The prompts of /v1/completions: a string, token ids, or a list of either; one entry for each prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
            param="prompt",
        )
    if _are_token_ids(prompt):
        return [prompt]
    return [_one_prompt(item, index) for index, item in enumerate(prompt)]


def _one_prompt(item: object, index: int) -> str | Sequence[int]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _are_token_ids(item):
        return item
    raise InvalidRequestError(
        f"prompt[{index}] must be a string or a list of token ids, got {json_name(item)}", param=f"prompt[{index}]"
    )


def _are_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)
