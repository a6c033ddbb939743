"""Tokens of one choice -> its text: UTF-8 across token borders, stop strings, and the logprobs that go with it."""

from __future__ import annotations

import codecs
from collections import deque

from cluster.api.output import ChoiceDelta, FinishReason, TokenLogprob
from cluster.serving.stop_strings import StopMatch, StopStringMatcher
from cluster.serving.text_delta import TextDelta, TextLogprob, TokenText
from cluster.serving.token_table import TokenTable

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class ChoiceText:
    """State of one choice. Ends at the first stop string; tokens that arrive later are ignored."""

    def __init__(
        self, index: int, table: TokenTable, stops: tuple[str, ...], min_tokens: int, skip_special_tokens: bool
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.is_finished = False
        self._table = table
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = _Utf8Decoder(errors="replace")
        self._stops = StopStringMatcher(stops)
        self._num_chars_made = 0  # decoded, released or held
        self._num_chars_out = 0  # released
        self._waiting: deque[TextLogprob] = deque()  # of tokens whose text is not released yet

    def feed(self, delta: ChoiceDelta) -> TextDelta | None:
        """None when there is nothing to tell: a finished choice, or text that is all held back without new tokens."""
        if self.is_finished:
            return None
        released: list[str] = []
        wants_logprobs = delta.logprobs is not None
        for position, token_id in enumerate(delta.token_ids):
            is_stop_token = position == len(delta.token_ids) - 1 and delta.stop_token_id is not None
            self.num_tokens += 1
            if is_stop_token:
                continue  # counted, but not part of the text
            if delta.logprobs is not None:
                self._waiting.append(self._explain(delta.logprobs[position]))
            match = self._feed_text(self._decode(token_id), released)
            if match is not None:
                return self._end(released, delta.token_ids[: position + 1], wants_logprobs, FinishReason.STOP, match)
        if delta.finish_reason is not None:
            match = self._feed_text(self._decode_rest(), released)
            if match is None:
                self._release(self._stops.flush(), released)
                return self._end(
                    released, delta.token_ids, wants_logprobs, delta.finish_reason, delta.stop_token_id, is_cut=False
                )
            return self._end(released, delta.token_ids, wants_logprobs, FinishReason.STOP, match)
        return self._tell(released, delta.token_ids, wants_logprobs)

    def _decode(self, token_id: int) -> str:
        if self._skip_special_tokens and self._table.is_special(token_id):
            return ""
        return self._utf8.decode(self._table.bytes_of(token_id))

    def _decode_rest(self) -> str:
        """A character that was never completed shows as U+FFFD, as it does in a decoding of the whole."""
        return self._utf8.decode(b"", final=True)

    def _feed_text(self, text: str, released: list[str]) -> str | None:
        """Returns the stop string that was completed, if one was."""
        if not text:
            return None
        self._num_chars_made += len(text)
        result = self._stops.feed(text, may_stop=self.num_tokens >= self._min_tokens)
        if isinstance(result, StopMatch):
            self._release(result.text, released)
            return result.stop
        self._release(result, released)
        return None

    def _release(self, text: str, released: list[str]) -> None:
        self._num_chars_out += len(text)
        released.append(text)

    def _tell(self, released: list[str], token_ids: tuple[int, ...], wants_logprobs: bool) -> TextDelta:
        logprobs = self._take_logprobs(is_all=False) if wants_logprobs else None
        return TextDelta(self.index, "".join(released), token_ids, logprobs)

    def _end(
        self,
        released: list[str],
        token_ids: tuple[int, ...],
        wants_logprobs: bool,
        reason: FinishReason,
        stop_reason: str | int | None,
        *,
        is_cut: bool = True,
    ) -> TextDelta:
        self.is_finished = True
        logprobs = self._take_logprobs(is_all=not is_cut) if wants_logprobs or self._waiting else None
        return TextDelta(self.index, "".join(released), token_ids, logprobs, reason, stop_reason)

    def _take_logprobs(self, *, is_all: bool) -> tuple[TextLogprob, ...]:
        taken = []
        while self._waiting and (is_all or self._waiting[0].text_offset < self._num_chars_out):
            taken.append(self._waiting.popleft())
        return tuple(taken)

    def _explain(self, logprob: TokenLogprob) -> TextLogprob:
        return TextLogprob(
            chosen=self._token_text(logprob.token_id, logprob.logprob),
            top=tuple(self._token_text(token_id, value) for token_id, value in logprob.top),
            text_offset=self._num_chars_made,
        )

    def _token_text(self, token_id: int, logprob: float) -> TokenText:
        return TokenText(token_id, self._table.text_of(token_id), self._table.bytes_of(token_id), logprob)
