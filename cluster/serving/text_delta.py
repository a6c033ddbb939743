"""What leaves the serving core: text with the tokens that made it, and the count at the end."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.output import FinishReason


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as text. `text` shows a part of a character as U+FFFD; `raw` are its true bytes."""

    token_id: int
    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """The chosen token, and the most likely ones, most likely first."""

    chosen: TokenText
    top: tuple[TokenText, ...]
    text_offset: int  # characters of the choice's text before this token's


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice. `logprobs` cover the tokens whose text starts before the end of the released text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TextLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended the choice


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one request, in tokens. `completion_tokens` counts to the stop, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
