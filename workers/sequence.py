"""One choice of one request while it is being generated. Thinks in integers; knows no tensor and no pool."""

from __future__ import annotations

from enum import IntEnum

from cache_service.block_key import BlockKeyer
from cluster.api.ids import BlockKey
from cluster.api.output import FinishReason
from cluster.api.request import Request
from cluster.api.scope import ScopeFields
from workers.block import BlockContent, BlockIdentity, BlockWriter


class SequenceStatus(IntEnum):
    """In order of progress. Only PREEMPTED may go back, to RUNNING."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


_ALLOWED = {
    SequenceStatus.WAITING: {SequenceStatus.RUNNING, SequenceStatus.FINISHED},
    SequenceStatus.RUNNING: {SequenceStatus.PREEMPTED, SequenceStatus.FINISHED},
    SequenceStatus.PREEMPTED: {SequenceStatus.RUNNING, SequenceStatus.FINISHED},
    SequenceStatus.FINISHED: set(),
}


class Sequence:
    """Mutable progress of one choice.

    Tokens 0 … num_tokens - 1 are known; the first num_computed_tokens of them have K and V in the blocks of
    `block_table`. A step computes some of the rest, and samples once none is left. Decoding is the case of one.
    """

    __slots__ = (
        "adapter_digest",
        "arrival",
        "block_keys",
        "block_table",
        "can_publish",
        "choice",
        "finish_reason",
        "last_published",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "output_token_ids",
        "request",
        "seq_id",
        "status",
        "unforked_choices",
        "window_pages",
        "window_start",
        "writer",
    )

    def __init__(
        self,
        seq_id: int,
        request: Request,
        arrival: int,
        writer: BlockWriter,
        adapter_digest: bytes | None = None,
        choice: int = 0,
        unforked_choices: tuple[int, ...] = (),
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.arrival = arrival
        self.writer = writer
        self.adapter_digest = adapter_digest
        self.choice = choice
        self.unforked_choices = unforked_choices  # choices that split off when the prompt is computed
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.output_token_ids: list[int] = list(request.emitted[choice]) if request.emitted else []
        self.block_keys: list[BlockKey] = list(request.block_keys)
        self.block_table: list[int] = []
        self.window_start = 0  # see workers/sliding_window.py; unused where every layer sees all tokens
        self.window_pages: list[int] = []
        self.num_computed_tokens = 0
        self.num_published_blocks = 0  # leading blocks of the table that are, or came from, the prefix cache
        self.last_published: BlockIdentity | None = None
        self.can_publish = request.use_prefix_cache  # closed for good when one block could not be published
        self.num_preemptions = 0
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Known tokens without K and V: 1 while decoding, more while the prompt is computed or recomputed."""
        return self.num_prompt_tokens + len(self.output_token_ids) - self.num_computed_tokens

    @property
    def num_slots(self) -> int:
        """Rows that this sequence will need once it has forked."""
        return 1 + len(self.unforked_choices)

    def set_status(self, status: SequenceStatus) -> None:
        """The one place where a status changes."""
        assert status in _ALLOWED[self.status], f"{self.status.name} -> {status.name}"
        self.status = status

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens at positions start … end - 1."""
        num_prompt = self.num_prompt_tokens
        if end <= num_prompt:
            return self.request.prompt_token_ids[start:end]
        output = tuple(self.output_token_ids[max(0, start - num_prompt) : end - num_prompt])
        return self.request.prompt_token_ids[start:] + output if start < num_prompt else output

    def fields_of_block(self, index: int) -> ScopeFields:
        for span in self.request.spans:
            if span.num_blocks is None or index < span.num_blocks:
                return span.fields
            index -= span.num_blocks
        raise AssertionError("spans were validated on arrival")

    def content_of_block(self, index: int, block_size: int) -> BlockContent:
        """What block `index` holds once it is full. Its key must be known."""
        tokens = self.tokens(index * block_size, (index + 1) * block_size)
        return BlockContent(self.block_keys[index], tokens, self.fields_of_block(index), self.adapter_digest)

    def derive_key(self, index: int, keyer: BlockKeyer) -> None:
        """Appends the key of output block `index`, the first one without a key."""
        assert index == len(self.block_keys)
        parent = self.block_keys[-1] if self.block_keys else None
        size = keyer.block_size
        tokens = self.tokens(index * size, (index + 1) * size)
        self.block_keys.append(keyer.child(parent, self.fields_of_block(index), tokens, self.adapter_digest))

    def fork(self, seq_id: int, choice: int) -> Sequence:
        """Another choice that shares all computed blocks. The caller takes the references."""
        child = Sequence(seq_id, self.request, self.arrival, self.writer, self.adapter_digest, choice)
        child.block_table = list(self.block_table)
        child.window_start, child.window_pages = self.window_start, list(self.window_pages)
        child.block_keys = list(self.block_keys)
        child.num_computed_tokens = self.num_computed_tokens
        child.num_published_blocks = self.num_published_blocks
        child.last_published = self.last_published
        child.can_publish = self.can_publish
        return child

    def forget_blocks(self) -> list[int]:
        """Drops the table, so that everything is recomputed; returns what the caller must release."""
        block_ids, self.block_table = self.block_table, []
        self.window_start, self.window_pages = 0, []
        self.num_computed_tokens = 0
        self.num_published_blocks = 0
        self.last_published = None
        return block_ids
