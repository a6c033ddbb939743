"""One choice of an answer that is sent whole: its deltas, put together."""

from __future__ import annotations

from cluster.api.output import FinishReason
from cluster.serving.text_delta import TextDelta, TextLogprob


class CollectedChoice:
    """`logprobs` is None when none were asked for."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.logprobs: list[TextLogprob] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, delta: TextDelta) -> None:
        self._pieces.append(delta.text)
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
