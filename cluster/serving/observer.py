"""Where the serving core reports times and counts. The metrics registry implements it; nothing here names a user."""

from __future__ import annotations

from typing import Protocol

from cluster.serving.text_delta import Usage


class GenerationObserver(Protocol):
    """All times are seconds on one monotonic clock, measured in the gateway."""

    def started(self, model: str) -> None: ...

    def first_token(self, model: str, after_s: float) -> None: ...

    def next_tokens(self, model: str, gap_s: float) -> None: ...

    def ended(self, model: str, outcome: str, after_s: float, usage: Usage) -> None:
        """`outcome` is a finish reason, an error's code, or "abort" when the caller went away."""
        ...


class NullObserver:
    def started(self, model: str) -> None:
        pass

    def first_token(self, model: str, after_s: float) -> None:
        pass

    def next_tokens(self, model: str, gap_s: float) -> None:
        pass

    def ended(self, model: str, outcome: str, after_s: float, usage: Usage) -> None:
        pass
