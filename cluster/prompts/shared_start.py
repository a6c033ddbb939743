"""Tokenizes many texts that begin alike without doing the common beginning again each time."""

from __future__ import annotations

from bisect import bisect_right

from cluster.prompts.tokenizer import Encoded, Tokenizer

_MARGIN_CHARS = 64  # a difference this far behind a token's start cannot change that token
_CHECKED_CHARS = 512
_UNCERTAIN_TOKENS = 16  # at the end of a piece that was cut off somewhere
_MAX_TRIES = 8


class SharedStart:
    """The tokens of one text, taken over for others up to shortly before they differ.

    A tokenizer may look at what lies before a token, so a place to start anew is used only if, in this very text,
    starting there gives the same tokens as coming from the beginning.
    """

    def __init__(self, tokenizer: Tokenizer, encoded: Encoded) -> None:
        self.encoded = encoded
        self._tokenizer = tokenizer
        self._starts = [start for start, _ in encoded.offsets]
        self._verdicts: dict[int, bool] = {}

    def token_ids(self, text: str, num_common_chars: int) -> tuple[int, ...]:
        """Of `text`, which agrees with this one in its first `num_common_chars` characters."""
        index = bisect_right(self._starts, num_common_chars - _MARGIN_CHARS) - 1
        for restart in range(index, max(index - _MAX_TRIES, 0), -1):
            if self._can_restart(restart):
                rest = self._tokenizer.encode(text[self._starts[restart] :])
                return self.encoded.token_ids[:restart] + rest.token_ids
        return self._tokenizer.encode(text).token_ids

    def _can_restart(self, index: int) -> bool:
        verdict = self._verdicts.get(index)
        if verdict is None:
            start = self._starts[index]
            piece = self._tokenizer.encode(self.encoded.text[start : start + _CHECKED_CHARS]).token_ids
            num_certain = max(len(piece) - _UNCERTAIN_TOKENS, 1)
            verdict = piece[:num_certain] == self.encoded.token_ids[index : index + num_certain]
            self._verdicts[index] = verdict
        return verdict
