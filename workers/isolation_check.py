"""Looks at every step before it runs: may each row read and write the blocks in its table?

It trusts no one: it keeps its own memory of which block, in which life, it has seen in which table, and compares it
with the pool's records. Only what is new in a table is examined; for the rest it is enough that no block has begun
another life, which is one comparison of two lists of integers per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.api.ids import RequestId
from workers.block import Block, BlockContent
from workers.block_pool import BlockPool
from workers.config import EngineConfig
from workers.scheduler import Schedule, ScheduledRow
from workers.sequence import Sequence
from workers.step import StepInput, StepRow


class ViolationKind(Enum):
    TABLE = "table"  # the row's table is not that of its sequence, too short, or names a block twice or out of range
    POSITION = "position"  # the row does not go on, with the right tokens, where its sequence stands
    SAMPLING = "sampling"  # sampling settings, output or counter of another sequence
    REUSED = "reused"  # a block in the table was freed or began another life
    FOREIGN = "foreign"  # a block that is neither the request's own nor shared with a scope it may read
    CONTENT = "content"  # a shared block holds other tokens, or follows another block, than the table says
    UNWRITTEN = "unwritten"  # would be read before it was written
    SHARED_WRITE = "shared_write"  # would be written although others hold or can find it
    CONSERVATION = "conservation"  # blocks lost or doubled


@dataclass(frozen=True, slots=True)
class Violation:
    """One finding. Names blocks and requests, never content."""

    kind: ViolationKind
    step_id: int
    request_id: RequestId | None = None
    seq_id: int | None = None
    block_id: int | None = None


Finding = tuple[ViolationKind, int | None]
"""What is wrong with a row, and the block at fault where there is one."""


@dataclass(slots=True)
class _Seen:
    """What was in order about one sequence's table when it was last checked."""

    table: list[int] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)
    num_readable: int = 0  # leading full blocks that may be read
    pages: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # block of the table -> (id, page, life)
    num_preemptions: int = 0  # a preempted sequence starts a new table


class IsolationChecker:
    """Checks one step at a time. Its cost per row is two comparisons of lists, plus the blocks that are new."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._size = config.block_size
        self._pool = pool
        self._seen: dict[int, _Seen] = {}
        self._num_missing = 0

    def check(self, step: StepInput, schedule: Schedule) -> list[Violation]:
        """All violations of a step that has not run yet."""
        violations: list[Violation] = []
        writers: set[int] = set()
        for step_row, row in zip(step.rows, schedule.rows, strict=True):
            finding = self._check_row(step_row, row, writers)
            if finding is not None:
                violations.append(_violation(step.step_id, finding, row.seq))
        for (source, target), seq in zip(step.block_copies, schedule.copy_holders, strict=True):
            if not self._is_own(source, seq) or not self._is_own(target, seq):
                violations.append(_violation(step.step_id, (ViolationKind.FOREIGN, source), seq))
        if self._pool.pages is not None:
            of_block = self._pool.pages.of_block
            expected = [(of_block[source], of_block[target]) for source, target in step.block_copies]
            wrong = [seq for seq, a, b in zip(schedule.copy_holders, expected, step.page_copies, strict=True) if a != b]
            violations.extend(_violation(step.step_id, (ViolationKind.FOREIGN, None), seq) for seq in wrong)
        num_missing = self._pool.num_missing
        if num_missing != self._num_missing:  # reported once, not in every step from now on
            self._num_missing = num_missing
            violations.append(Violation(ViolationKind.CONSERVATION, step.step_id))
        return violations

    def forget(self, seq: Sequence) -> None:
        """The sequence ended."""
        self._seen.pop(seq.seq_id, None)

    def _check_row(self, step_row: StepRow, row: ScheduledRow, writers: set[int]) -> Finding | None:
        """The first thing wrong with a row, or None."""
        seq = row.seq
        seen = self._seen.get(seq.seq_id)
        if seen is None or seen.num_preemptions != seq.num_preemptions:
            seen = self._seen[seq.seq_id] = _Seen(num_preemptions=seq.num_preemptions)
        return (
            self._check_record(step_row, row)
            or self._check_lives(seen, seq.block_table)
            or self._check_reads(seen, seq, row.start)
            or self._check_window(seen, step_row, row)
            or self._check_writes(seq, row.start // self._size, (row.end - 1) // self._size, writers)
        )

    def _check_record(self, step_row: StepRow, row: ScheduledRow) -> Finding | None:
        """Whether what the runner gets is what the sequence says."""
        seq = row.seq
        table = step_row.block_table
        is_own_table = table is seq.block_table or list(table) == seq.block_table
        if step_row.seq_id != seq.seq_id or not is_own_table or row.end > len(table) * self._size:
            return ViolationKind.TABLE, None
        is_in_place = step_row.start == row.start == seq.num_computed_tokens and row.end <= seq.num_tokens
        if not is_in_place or tuple(step_row.token_ids) != seq.tokens(row.start, row.end):
            return ViolationKind.POSITION, None
        for sample in step_row.samples:
            if (
                sample.params is not seq.request.sampling
                or sample.position != len(seq.output_token_ids)
                or sample.output_token_ids is not seq.output_token_ids
            ):
                return ViolationKind.SAMPLING, None
        return None

    def _check_lives(self, seen: _Seen, table: list[int]) -> Finding | None:
        """Whether every block is still in the life in which it entered the table."""
        lives = self._pool.lives
        if table == seen.table:
            current = list(map(lives.__getitem__, table))
            if current == seen.lives:
                return None
            changed = next(i for i, life in enumerate(current) if life != seen.lives[i])
            return ViolationKind.REUSED, table[changed]
        if min(table) < 0 or max(table) >= len(lives) or len(set(table)) != len(table):
            return ViolationKind.TABLE, None
        current = list(map(lives.__getitem__, table))
        num_same = 0
        for old, new, old_life, life in zip(seen.table, table, seen.lives, current, strict=False):
            if old != new:
                break  # copied on write, a duplicate swapped for the published block, or recomputed from the start
            if old_life != life:
                return ViolationKind.REUSED, new
            num_same += 1
        freed = next((block_id for block_id, life in zip(table, current, strict=True) if life <= 0), None)
        if freed is not None:
            return ViolationKind.REUSED, freed
        seen.table, seen.lives = list(table), current
        seen.num_readable = min(seen.num_readable, num_same)
        return None

    def _check_reads(self, seen: _Seen, seq: Sequence, start: int) -> Finding | None:
        """Whether positions 0 … start - 1 were written, by this request or for everyone in a scope it is in."""
        for index in range(seen.num_readable, -(-start // self._size)):
            block = self._pool.blocks[seq.block_table[index]]
            if block.num_written < min(self._size, start - index * self._size):
                return ViolationKind.UNWRITTEN, block.block_id
            if block.content is not None:
                kind = self._check_published(seq, index, block, block.content)
                if kind is not None:
                    return kind, block.block_id
            elif block.owner != seq.request.request_id and not block.is_retracted:
                return ViolationKind.FOREIGN, block.block_id
        seen.num_readable = start // self._size
        return None

    def _check_published(self, seq: Sequence, index: int, block: Block, content: BlockContent) -> ViolationKind | None:
        fields, request = content.fields, seq.request
        if (
            fields != seq.fields_of_block(index)
            or fields.tenant not in (None, request.tenant_hash)
            or fields.user not in (None, request.user_hash)
        ):
            return ViolationKind.FOREIGN
        parent = self._pool.blocks[seq.block_table[index - 1]].identity if index else None
        if block.parent != parent or content.token_ids != seq.tokens(index * self._size, (index + 1) * self._size):
            return ViolationKind.CONTENT
        return None

    def _check_window(self, seen: _Seen, step_row: StepRow, row: ScheduledRow) -> Finding | None:
        """Whether the layers with a window find all that the row sees, each page in the life in which it was given.

        Whose the blocks are, and what is in them, has been looked at: a page is its block's alone.
        """
        pages, table = self._pool.pages, row.seq.block_table
        if pages is None:
            return None
        first, end = step_row.window_start, step_row.window_start + len(step_row.window_pages)
        is_covered = first <= pages.first_seen(row.start) and row.end <= end * self._size and end <= len(table)
        if first != row.seq.window_start or not is_covered:
            return ViolationKind.TABLE, None
        found = {}
        for index, page in enumerate(step_row.window_pages, first):
            block_id = table[index]
            if not 0 < page < pages.num_pages or pages.of_block[block_id] != page or pages.block_of[page] != block_id:
                return ViolationKind.REUSED, block_id
            found[index] = (block_id, page, pages.lives[page])
            before = seen.pages.get(index)
            if before is not None and before[:2] == (block_id, page) and before != found[index]:
                return ViolationKind.REUSED, block_id
            if pages.num_written[page] < min(self._size, row.start - index * self._size):
                return ViolationKind.UNWRITTEN, block_id
        seen.pages = found
        return None

    def _check_writes(self, seq: Sequence, first: int, last: int, writers: set[int]) -> Finding | None:
        """Whether the blocks that the row writes are its alone."""
        for index in range(first, last + 1):
            block = self._pool.blocks[seq.block_table[index]]
            if block.owner != seq.request.request_id:
                return ViolationKind.FOREIGN, block.block_id
            if block.ref_count != 1 or block.content is not None or block.block_id in writers:
                return ViolationKind.SHARED_WRITE, block.block_id
            writers.add(block.block_id)
        return None

    def _is_own(self, block_id: int, seq: Sequence) -> bool:
        return self._pool.blocks[block_id].owner == seq.request.request_id


def _violation(step_id: int, finding: Finding, seq: Sequence) -> Violation:
    kind, block_id = finding
    return Violation(kind, step_id, seq.request.request_id, seq.seq_id, block_id)
