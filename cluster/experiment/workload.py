"""What kind of traffic an experiment sends: everything that can be varied without touching the engine."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.experiment.wordings import DEFAULT_WORDINGS, WORDINGS


@dataclass(frozen=True, slots=True)
class Workload:
    """One round sends `num_fillers` requests and then `concurrency` marked ones (A, B, …)."""

    concurrency: int = 2
    num_fillers: int = 2
    wordings: tuple[str, ...] = DEFAULT_WORDINGS
    max_tokens: int = 32
    filler_max_tokens: int = 48  # fillers must outlive the prefill of the marked ones
    context_words: tuple[int, int] = (0, 0)  # neutral words before the question: A's and B's, alternating
    prefix_similarity: float = 0.0  # share of the context words that all prompts of a round have in common
    num_turns: int = 1  # > 1: the marker was given that many turns ago
    mixed_sampling: bool = False  # temperatures, seeds, stop strings and logprobs differ within a round
    stream: bool | None = None  # None: every other request streams
    abort_fraction: float = 0.0  # of the fillers, cut off after a few tokens
    regions: tuple[str, ...] = ()  # values of a registered template's shared variable; empty: raw requests
    num_sessions: int = 0  # conversations of one user, each with a session id; 0: many users without session ids
    ignore_eos: bool = False  # answers as long as max_tokens allows
    arrival_gap_steps: int = 1  # engine steps between two arrivals of a round

    def wording_of(self, round_index: int) -> str:
        """The wordings take turns."""
        return self.wordings[round_index % len(self.wordings)]

    def __post_init__(self) -> None:
        _check("concurrency", self.concurrency, 2, 64)
        _check("num_fillers", self.num_fillers, 0, 256)
        _check("max_tokens", self.max_tokens, 1, 4096)
        _check("prefix_similarity", self.prefix_similarity, 0, 1)
        _check("abort_fraction", self.abort_fraction, 0, 1)
        _check("num_turns", self.num_turns, 1, 32)
        _check("num_sessions", self.num_sessions, 0, 64)
        unknown = [name for name in self.wordings if name not in WORDINGS]
        if unknown or not self.wordings:
            raise ValueError(f"wordings {list(self.wordings)}, wanted some of {', '.join(WORDINGS)}")


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} = {value}, wanted {low} to {high}")
