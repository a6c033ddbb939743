"""What stands in for everything private when a canonical rendering is made.

A probe must not let anything private show: contents are empty, long, and begin with every kind of character that a
tokenizer treats differently; the number and roles of the following messages, tools and the generation prompt vary; and
every text that the chat template compares contents with is tried too, so that its branches are seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import nodes

from cluster.prompts.chat_template import chat_environment

LONG = "Lorem ipsum dolor sit amet, consectetur adipiscing elit. " * 20
FIRST_CHARACTERS = ("", "Zq", "\n\n", " 7", "-", "好", "'s")
_MAX_CONSTANTS = 24
_MAX_CONSTANT_CHARS = 64
_TEXT_METHODS = frozenset({"startswith", "endswith", "split", "rsplit", "find", "count", "replace", "strip"})

TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
_CALL = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": {"x": "y"}}}


@dataclass(frozen=True, slots=True)
class Probe:
    """`content` continues the message in which static text ends; `tail` follows it."""

    content: str
    tail: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **extra}


_BASE = (_user("Zq"),)
_TAILS: tuple[tuple[dict[str, Any], ...], ...] = (
    (),
    _BASE,
    (_assistant("7"), _user("Zq")),
    (_user("Zq"), _assistant("7"), _user("-")),
    (_user("Zq"), _assistant("7"), _user("-"), _assistant("好"), _user("x")),
    ({"role": "system", "content": "Zq"}, _user("7")),
    (_user("Zq"), _assistant("", tool_calls=[_CALL]), {"role": "tool", "content": "7", "tool_call_id": "probe0001"}),
    (_user("Zq"), _assistant("7")),
)


@dataclass(frozen=True)
class ProbeSet:
    """`full` varies everything; `contents_only` is for finding where a single variable begins to matter."""

    constants: tuple[str, ...] = field(default=())

    def full(self, *, is_cut: bool) -> Iterator[Probe]:
        """`is_cut`: static text ends inside a message, which the probe's content continues."""
        for content in (*FIRST_CHARACTERS, LONG, *self.constants):
            yield Probe(content, _BASE) if is_cut else Probe("", (_user(content),))
        for tail in _TAILS:
            yield Probe("Zq", tail)
            yield Probe("7", tail, tools=(TOOL,))
        yield Probe("Zq", _BASE, add_generation_prompt=False)

    def contents_only(self) -> Iterator[Probe]:
        for content in FIRST_CHARACTERS:
            yield Probe(content, _BASE)


def probes_for(chat_template: str | None) -> ProbeSet:
    """Probes that know which texts this chat template looks for."""
    if chat_template is None:
        return ProbeSet()
    found = dict.fromkeys(_compared_texts(chat_environment().parse(chat_template)))
    return ProbeSet(tuple(found)[:_MAX_CONSTANTS])


def _compared_texts(tree: nodes.Template) -> Iterator[str]:
    for compare in tree.find_all(nodes.Compare):
        yield from _texts([compare.expr, *(operand.expr for operand in compare.ops)])
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _TEXT_METHODS:
            yield from _texts(call.args)


def _texts(expressions: Sequence[nodes.Node]) -> Iterator[str]:
    for node in expressions:
        if isinstance(node, nodes.Const) and isinstance(node.value, str) and 0 < len(node.value) <= _MAX_CONSTANT_CHARS:
            yield node.value
