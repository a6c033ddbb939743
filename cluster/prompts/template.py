"""A registered prompt template: its definition, checked, and the values that a request gives to its variables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from cluster.api.errors import InvalidRequestError
from cluster.prompts.messages import checked_unicode
from cluster.prompts.policy import Granularity, Share, parse_choice

MAX_MESSAGES = 64
MAX_VARIABLES = 64
MAX_SOURCE_CHARS = 131_072
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_ROLES = ("system", "developer", "user", "assistant")
_FIELDS = frozenset({"messages", "variables", "share", "granularity", "public"})

# bool is an int in Python but not here.
_CHECKS = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


@dataclass(frozen=True, slots=True)
class Variable:
    """`is_shared`: users of the tenant who give it the same value may share blocks that depend on it."""

    name: str
    type: str = "string"
    is_shared: bool = False

    def check(self, value: Any) -> None:
        """Raises InvalidRequestError that names the variable, never its value."""
        param = f"prompt.variables.{self.name}"
        if not _CHECKS[self.type](value):
            got = "null" if value is None else type(value).__name__
            raise InvalidRequestError(f"variable {self.name!r} must be of type {self.type}, got {got}", param=param)
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            raise InvalidRequestError(
                f"variable {self.name!r} holds NaN, infinity or too deep nesting", param=param
            ) from None
        checked_unicode(text, param)


@dataclass(frozen=True)
class PromptTemplate:
    """Immutable; two templates with equal `version` are equal."""

    messages: tuple[tuple[str, str], ...]  # (role, Jinja2 source)
    variables: tuple[Variable, ...] = ()
    share: Share = Share.VARIABLES
    granularity: Granularity = Granularity.BLOCK
    is_public: bool = False  # the operator's word only

    @cached_property
    def version(self) -> str:
        """Digest of everything that the definition says."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return sha256(text.encode()).hexdigest()[:32]

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(content for _, content in self.messages)

    @property
    def shared_names(self) -> tuple[str, ...]:
        return tuple(variable.name for variable in self.variables if variable.is_shared)

    def to_dict(self) -> dict[str, Any]:
        """The form in which templates are stored, answered and digested."""
        return {
            "messages": [{"role": role, "content": content} for role, content in self.messages],
            "variables": {
                variable.name: {"type": variable.type, "share": "shared" if variable.is_shared else "user"}
                for variable in self.variables
            },
            "share": self.share.value,
            "granularity": self.granularity.value,
            "public": self.is_public,
        }

    @classmethod
    def from_dict(cls, body: Any) -> PromptTemplate:
        """Raises InvalidRequestError with the field at fault. Does not look into the Jinja2 sources."""
        if not isinstance(body, Mapping):
            raise InvalidRequestError("a prompt template must be an object")
        unknown = sorted(str(key) for key in body.keys() - _FIELDS)
        if unknown:
            raise InvalidRequestError(f"unknown field {unknown[0][:40]!r} in prompt template", param=unknown[0][:40])
        is_public = body.get("public", False)
        if not isinstance(is_public, bool):
            raise InvalidRequestError("public must be true or false", param="public")
        return cls(
            messages=_messages(body.get("messages")),
            variables=_variables(body.get("variables", {})),
            share=parse_choice(Share, body.get("share", Share.VARIABLES.value), "share"),
            granularity=parse_choice(Granularity, body.get("granularity", Granularity.BLOCK.value), "granularity"),
            is_public=is_public,
        )

    def check_values(self, values: Any) -> dict[str, Any]:
        """The values of all variables. Raises InvalidRequestError that names a missing, unknown or ill-typed one."""
        if not isinstance(values, Mapping):
            raise InvalidRequestError("prompt.variables must be an object", param="prompt.variables")
        known = {variable.name for variable in self.variables}
        for name in values:
            if name not in known:
                shown = str(name)[:64]
                raise InvalidRequestError(f"unknown variable {shown!r}", param=f"prompt.variables.{shown}")
        for variable in self.variables:
            if variable.name not in values:
                param = f"prompt.variables.{variable.name}"
                raise InvalidRequestError(f"variable {variable.name!r} is missing", param=param)
            variable.check(values[variable.name])
        return {variable.name: values[variable.name] for variable in self.variables}


def canonical_json(value: Any) -> bytes:
    """Equal bytes exactly for equal JSON values; 1, 1.0, true and "1" differ."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _messages(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidRequestError(f"messages must be an array of 1 to {MAX_MESSAGES} messages", param="messages")
    messages = []
    for index, item in enumerate(value):
        param = f"messages[{index}]"
        if not isinstance(item, Mapping) or item.keys() != {"role", "content"}:
            raise InvalidRequestError(f"{param} must have exactly role and content", param=param)
        if item["role"] not in _ROLES:
            raise InvalidRequestError(f"{param}.role must be one of {', '.join(_ROLES)}", param=f"{param}.role")
        if not isinstance(item["content"], str):
            raise InvalidRequestError(f"{param}.content must be a string", param=f"{param}.content")
        messages.append((item["role"], checked_unicode(item["content"], f"{param}.content")))
    num_chars = sum(len(content) for _, content in messages)
    if num_chars > MAX_SOURCE_CHARS:
        raise InvalidRequestError(f"the template has {num_chars} characters, at most {MAX_SOURCE_CHARS} are allowed")
    return tuple(messages)


def _variables(value: Any) -> tuple[Variable, ...]:
    if not isinstance(value, Mapping) or len(value) > MAX_VARIABLES:
        raise InvalidRequestError(f"variables must be an object of at most {MAX_VARIABLES}", param="variables")
    return tuple(_variable(name, definition) for name, definition in value.items())


def _variable(name: Any, definition: Any) -> Variable:
    shown = str(name)[:64]
    param = f"variables.{shown}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(f"variable name {shown!r} must be an identifier of 1 to 64 characters", param=param)
    if not isinstance(definition, Mapping) or definition.keys() - {"type", "share"}:
        raise InvalidRequestError(f"{param} may have only type and share", param=param)
    kind = definition.get("type", "string")
    if kind not in _CHECKS:
        raise InvalidRequestError(f"{param}.type must be one of {', '.join(_CHECKS)}", param=f"{param}.type")
    share = definition.get("share", "user")
    if share not in ("user", "shared"):
        raise InvalidRequestError(f"{param}.share must be user or shared", param=f"{param}.share")
    return Variable(name, kind, share == "shared")
