"""What was seen of a request and of a round. A field that a target cannot see from outside is None, never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """One output token as the engine chose it: enough to compare two runs bit for bit."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that came back for one request. `engine_tokens` are those that the engine made for it, whoever got
    them; `tokens` those that were delivered."""

    name: str
    text: str = ""
    logprob_texts: tuple[str, ...] = ()  # tokens in the logprobs, joined by rank: chosen ones, most likely ones, …
    error: str | None = None
    finish_reason: str | None = None
    num_cached_tokens: int | None = None
    num_prompt_tokens: int | None = None
    was_aborted: bool = False
    first_token_s: float | None = None
    tokens: tuple[TokenTrace, ...] | None = None
    engine_tokens: tuple[TokenTrace, ...] | None = None
    token_steps: tuple[int, ...] = ()  # engine step of each of `engine_tokens`

    @property
    def searchable(self) -> str:
        """All text of a reply. The parts are kept apart, so that no marker arises where two of them meet."""
        return "\n".join((self.text, *self.logprob_texts, self.error or ""))


@dataclass(frozen=True, slots=True)
class Violation:
    """What a structural check or a second line of defence reported, as the engine worded it."""

    kind: str
    request: str | None  # the plan's name of the reader, when known
    step: int | None
    block: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class Reuse:
    """A request took a block that another one wrote, by the engine's event log. `writer` None: no longer known."""

    reader: str
    writer: str | None
    scope: str | None
    step: int
    block: int


@dataclass(frozen=True, slots=True)
class RoundObservation:
    """`counters` are the increments of the engine's own counters over the round."""

    index: int
    by_name: Mapping[str, Observation]
    shared_step: bool | None = None  # each marked request shared a step with another one; None: cannot be seen
    num_evictions: int | None = None
    num_preemptions: int | None = None
    violations: tuple[Violation, ...] = ()
    reuses: tuple[Reuse, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
