"""The model's own chat template: messages to text, in a sandbox, with a clock that tests can set."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.api.errors import InvalidRequestError

Clock = Callable[[], datetime]
_MAX_ERROR_CHARS = 200


class GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; for serving, its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it as a plain attribute)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusalError(jinja2.TemplateError):
    """The template called raise_exception()."""


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As chat templates expect it: no HTML escapes, Unicode kept."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise TemplateRefusalError(message)


def chat_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


class ChatTemplate:
    """A compiled chat template. `clock_formats` are the strftime formats it has asked for so far."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock = datetime.now) -> None:
        environment = chat_environment()
        environment.globals["strftime_now"] = self._strftime_now
        environment.globals.update(special_tokens)
        self.source = source
        self.clock_formats: set[str] = set()
        self._clock = clock
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template does not compile: {error}") from error
        # Models that know no "developer" role get its text as a system turn.
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Raises InvalidRequestError when the template refuses the messages (an order of roles, say)."""
        turns = [self._known_role(message) for message in messages]
        try:
            return self._template.render(
                messages=turns, tools=tools or None, add_generation_prompt=add_generation_prompt, **extra
            )
        except TemplateRefusalError as error:
            reason = str(error)[:_MAX_ERROR_CHARS]
            raise InvalidRequestError(f"the model's chat template refuses these messages: {reason}") from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            kind = type(error).__name__
            raise InvalidRequestError(f"the model's chat template cannot render these messages ({kind})") from None

    def _strftime_now(self, fmt: str) -> str:
        self.clock_formats.add(fmt)
        return self._clock().strftime(fmt)

    def _known_role(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message
