"""A bounded memory of what happened to which block: the evidence behind `watchword trace`. Holds no token or text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from cluster.api.ids import RequestId
from cluster.api.scope import Scope
from workers.block import Block


class BlockAction(Enum):
    ALLOCATE = "allocate"
    WRITE = "write"
    REUSE = "reuse"  # a prefix hit, a fork, or the swap of a duplicate for the published block
    RELEASE = "release"
    EVICT = "evict"
    PUBLISH = "publish"


class BlockRecord(NamedTuple):
    """One event. A tuple rather than a dataclass: one is made for every block written in every step."""

    step_id: int
    time_s: float
    action: BlockAction
    block_id: int
    generation: int
    request_id: RequestId | None
    scope: Scope | None  # None while the block is unpublished
    user_hash: bytes | None = None  # keyed hash of whose tokens the block may hold


class BlockEventLog:
    """A ring of the last `size` records. The engine sets step and time once per step."""

    def __init__(self, size: int) -> None:
        self._records: deque[BlockRecord] = deque(maxlen=size)
        self._step_id = 0
        self._time_s = 0.0
        self.num_recorded = 0

    def begin_step(self, step_id: int, time_s: float) -> None:
        self._step_id = step_id
        self._time_s = time_s

    def record(self, action: BlockAction, block: Block, request_id: RequestId | None) -> None:
        content = block.content
        scope = content.fields.scope if content is not None else None
        self.num_recorded += 1
        self._records.append(
            BlockRecord(
                self._step_id,
                self._time_s,
                action,
                block.block_id,
                block.generation,
                request_id,
                scope,
                block.user_hash,
            )
        )

    @property
    def is_complete(self) -> bool:
        """False once the oldest records have been overwritten."""
        return self.num_recorded == len(self._records)

    def __iter__(self) -> Iterator[BlockRecord]:
        return iter(tuple(self._records))

    def of_request(self, request_id: RequestId) -> list[BlockRecord]:
        return [record for record in self if record.request_id == request_id]

    def of_block(self, block_id: int, generation: int | None = None) -> list[BlockRecord]:
        """All lives of a block, or one of them."""
        return [
            record
            for record in self
            if record.block_id == block_id and (generation is None or record.generation == generation)
        ]

    def trace(self, request_id: RequestId) -> list[BlockRecord]:
        """Everything that happened to the blocks a request touched, in the lives in which it touched them."""
        touched = {(record.block_id, record.generation) for record in self.of_request(request_id)}
        return [record for record in self if (record.block_id, record.generation) in touched]
