"""A request that the engine works on: its choices as sequences, and what has been told about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.api.request import Request
from workers.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class LiveRequest:
    """From arrival until all its choices are done."""

    request: Request
    arrival: int  # unique, unlike the id, which may come back after an abort
    num_choices_left: int
    sequences: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int | None = None  # set at the first admission
    is_cached_reported: bool = False

    @property
    def is_finished(self) -> bool:
        return self.num_choices_left == 0

    @property
    def unfinished(self) -> list[Sequence]:
        return [seq for seq in self.sequences if seq.status is not SequenceStatus.FINISHED]

    @property
    def has_output(self) -> bool:
        """Whether this engine has made a token of it, on top of those that a resumed request came with."""
        emitted = self.request.emitted
        return any(len(seq.output_token_ids) > len(emitted[seq.choice] if emitted else ()) for seq in self.sequences)

    def note_admitted(self, seq: Sequence, block_size: int) -> None:
        """The first admission decides what the caller is told: later hits are only the request's own blocks."""
        if self.num_cached_tokens is None:
            num_prompt = seq.num_prompt_tokens
            self.num_cached_tokens = min(seq.num_published_blocks, num_prompt // block_size) * block_size

    def take_num_cached_tokens(self) -> int | None:
        """The figure, the first time it is asked for once known."""
        if self.is_cached_reported or self.num_cached_tokens is None:
            return None
        self.is_cached_reported = True
        return self.num_cached_tokens
