"""Control tokens (`<|im_start|>` …) and the texts that merely look like them.

A caller's text must never become a control token. Before a template is rendered, every look-alike in the caller's
values is broken by an escape character; after rendering, whatever still matches was put there by the template. The
escape character is chosen per request so that it occurs in none of the values, and is removed before tokenizing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from cluster.api.errors import InvalidRequestError

_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # plane 15: valid in UTF-8, meaningless to templates, not whitespace


class ControlTokens:
    """The control tokens of one tokenizer, by text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({text for text in texts if text}, key=lambda text: (-len(text), text)))
        # Longest first: alternation in `re` takes the first branch that matches.
        self._pattern = re.compile("|".join(re.escape(text) for text in self.texts) or r"(?!)")
        self._prefixes = frozenset(text[:length] for text in self.texts for length in range(1, len(text)))
        self._longest_prefix = max((len(prefix) for prefix in self._prefixes), default=0)

    def find(self, text: str) -> list[re.Match[str]]:
        """All control tokens in `text`, leftmost-longest."""
        return list(self._pattern.finditer(text))

    def occur_in(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def escape(self, text: str, mark: str) -> str:
        """`text` with `mark` inside every look-alike, also inside one that a following value could complete."""
        if self._pattern.search(text) is not None:
            text = self._pattern.sub(lambda match: _broken(match.group(), mark), text)
        for length in range(min(self._longest_prefix, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return text[:-length] + _broken(text[-length:], mark)
        return text

    def escape_tree(self, value: Any, mark: str) -> Any:
        """`escape` on every string of a JSON-like value, keys included."""
        if isinstance(value, str):
            return self.escape(value, mark)
        if isinstance(value, Mapping):
            return {self.escape_tree(key, mark): self.escape_tree(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_tree(item, mark) for item in value]
        return value


def choose_mark(values: Any) -> str:
    """A character that occurs nowhere in `values`. Raises InvalidRequestError when they hold all of a whole plane."""
    used: set[str] = set()
    _collect_private_use(values, used)
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequestError("the text uses every character of Unicode's private plane 15; at least one must be free")


def _broken(text: str, mark: str) -> str:
    return text[0] + mark + text[1:]


def _collect_private_use(value: Any, into: set[str]) -> None:
    if isinstance(value, str):
        if value and max(value) >= chr(_PRIVATE_USE.start):
            into.update(character for character in value if character >= chr(_PRIVATE_USE.start))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect_private_use(key, into)
            _collect_private_use(item, into)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect_private_use(item, into)
