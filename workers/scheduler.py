"""Which sequences get how many tokens in the next step. Integers only.

First come, first served within a tenant, and the tenant with fewest running sequences first: whoever floods the queue
waits behind the others, not they behind it. Nobody overtakes because of a better prefix hit, since that would let one
user see from the waiting time what another one has cached. Running sequences decode first; the rest of the token budget
goes to prompts, in chunks.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from workers.block_pool import NO_MATCH, BlockPool, PrefixMatch
from workers.config import Batching, EngineConfig
from workers.sequence import Sequence, SequenceStatus
from workers.sliding_window import SlidingWindow


@dataclass(slots=True)
class ScheduledRow:
    """`num_tokens` of `seq` from its num_computed_tokens on."""

    seq: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_sampling(self) -> bool:
        """Whether this row reaches the last known token, so that the next one can be drawn."""
        return self.end == self.seq.num_tokens


@dataclass(slots=True)
class Schedule:
    rows: list[ScheduledRow] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target), before the step
    page_copies: list[tuple[int, int]] = field(default_factory=list)  # the same, where layers have a sliding window
    copy_holders: list[Sequence] = field(default_factory=list)  # whose reference keeps each copy's source alive
    admitted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns the queue, the running list and, through the pool, every block table."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.num_preemptions = 0
        self.max_num_seqs = config.max_num_seqs  # may be lowered and raised between steps, see LLMEngine
        self._config = config
        self._pool = pool
        self.window: SlidingWindow | None = None
        if pool.pages is not None:
            self.window = SlidingWindow(pool, pool.pages, config.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def is_stuck(self) -> bool:
        """Asked after a schedule without rows: nothing runs that could make room for what waits."""
        return bool(self.waiting) and not self.running

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def add_fork(self, seq: Sequence) -> None:
        """A choice that starts running at once, on the blocks of its sibling."""
        seq.set_status(SequenceStatus.RUNNING)
        self._insert_running(seq)

    def schedule(self) -> Schedule:
        schedule = Schedule()
        budget = self._schedule_decodes(schedule, self._config.max_num_batched_tokens)
        prefilling = [seq for seq in self.running if seq.num_new_tokens > 1]
        if len(self.running) + len(self.waiting) > 1:
            budget = min(budget, self._config.max_shared_prefill_tokens)
        ahead, behind = self._around_newcomers(prefilling)
        # Newcomers first: a short prompt then has its first token one step after it came, whatever others still
        # prefill. Those go on by a block at least, so that a steady stream of newcomers cannot stop them.
        kept = min(budget, self._config.block_size) if behind else 0
        budget = self._schedule_prefills(ahead, schedule, budget - kept)
        budget = self._admit(schedule, budget)
        self._schedule_prefills(behind, schedule, budget + kept)
        return schedule

    def finish(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives back its blocks."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        seq.set_status(SequenceStatus.FINISHED)
        self._release(seq)

    def preempt(self, seq: Sequence) -> None:
        """Back to the head of the queue; its tokens stay, their K and V are recomputed later."""
        self.running.remove(seq)
        seq.set_status(SequenceStatus.PREEMPTED)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._release(seq)
        self.waiting.appendleft(seq)

    def release_copy_sources(self, schedule: Schedule) -> None:
        """After the step: the sources of its block copies are no longer read."""
        for (source, _), seq in zip(schedule.block_copies, schedule.copy_holders, strict=True):
            if self.window is not None:
                self.window.release_copy_source(source)
            self._pool.release((source,), seq.writer)

    # --- running sequences

    def _schedule_decodes(self, schedule: Schedule, budget: int) -> int:
        for seq in tuple(self.running):
            if seq.status is not SequenceStatus.RUNNING or seq.num_new_tokens != 1:
                continue
            if self._make_writable(seq, schedule):
                schedule.rows.append(ScheduledRow(seq, seq.num_computed_tokens, 1))
                budget -= 1
        return budget

    def _around_newcomers(self, prefilling: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Prompts that go on before the next newcomer starts, and those that go on after; each with the smaller tenants
        first, then in order of arrival. Before: those of another tenant that has, besides this prompt, less running."""
        if not prefilling:
            return [], []
        num_running = self._num_running_by_tenant()
        ordered = sorted(prefilling, key=lambda seq: num_running[seq.request.tenant_hash])
        if not self.waiting:
            return [], ordered
        newcomer = self._next_waiting().request.tenant_hash
        others = [seq for seq in ordered if seq.request.tenant_hash != newcomer]
        ahead = [seq for seq in others if num_running[seq.request.tenant_hash] <= num_running[newcomer]]
        return ahead, [seq for seq in ordered if seq not in ahead]

    def _schedule_prefills(self, prefilling: list[Sequence], schedule: Schedule, budget: int) -> int:
        """Returns what is left of the budget."""
        for seq in prefilling:
            if budget > 0 and seq.status is SequenceStatus.RUNNING:
                if self.window is not None and not schedule.rows and not self._make_room(seq, num_blocks=0):
                    continue  # with rows scheduled it may wait for a page: they go on, and end
                budget -= self._schedule_chunk(seq, schedule, budget)
        return budget

    def _schedule_chunk(self, seq: Sequence, schedule: Schedule, budget: int) -> int:
        is_alone = len(self.running) + len(self.waiting) == 1
        cap = budget if is_alone else min(budget, self._config.max_shared_chunk_tokens)
        num_tokens = min(seq.num_new_tokens, cap)
        if self.window is not None:
            num_tokens = self.window.extend(seq, num_tokens)
            if num_tokens == 0:
                return 0
        schedule.rows.append(ScheduledRow(seq, seq.num_computed_tokens, num_tokens))
        return num_tokens

    def _make_writable(self, seq: Sequence, schedule: Schedule) -> bool:
        """Sees to it that the next position lies in a block that is this sequence's alone. False: it was preempted."""
        index = seq.num_computed_tokens // self._config.block_size
        is_new = index == len(seq.block_table)
        if not is_new and self._pool.blocks[seq.block_table[index]].ref_count == 1:
            return self.window is None or self._extend_window(seq, self.window)
        if not self._make_room(seq):
            return False
        block = self._pool.allocate(seq.writer)
        if is_new:
            seq.block_table.append(block.block_id)
            return self.window is None or self._extend_window(seq, self.window)
        # Copy on write. The reference to the source passes from the table to the step, which reads it.
        source = seq.block_table[index]
        block.num_written = self._pool.blocks[source].num_written
        schedule.block_copies.append((source, block.block_id))
        schedule.copy_holders.append(seq)
        if self.window is not None:
            schedule.page_copies.append(self.window.copy_on_write(seq, index, block))
        seq.block_table[index] = block.block_id
        return True

    def _extend_window(self, seq: Sequence, window: SlidingWindow) -> bool:
        """Sees to it that the next position has a page. False: the sequence was preempted."""
        if window.extend(seq, 1):
            return True
        return self._make_room(seq, num_blocks=0) and window.extend(seq, 1) == 1

    def _make_room(self, seq: Sequence, num_blocks: int = 1) -> bool:
        """Preempts the latest arrivals until there are so many blocks, and a page. False: `seq` itself had to go."""
        while not self._pool.can_allocate(num_blocks) or (self.window is not None and not self.window.has_room):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    # --- waiting sequences

    def _admit(self, schedule: Schedule, budget: int) -> int:
        """Returns what is left of the budget."""
        if self._config.batching is Batching.STATIC and self.running:
            return budget
        num_slots = sum(seq.num_slots for seq in self.running)
        while self.waiting and budget > 0:
            seq = self._next_waiting()
            if num_slots and num_slots + seq.num_slots > self.max_num_seqs:
                return budget
            match = self._match(seq)
            num_blocks = -(-seq.num_tokens // self._config.block_size) - len(match.blocks)
            # Each running sequence may need a block soon. Without this reserve a newcomer, or the sequence preempted
            # last, would be let in only to be preempted again.
            if not self._pool.can_allocate(num_blocks + len(self.running), match):
                return budget
            if self.window is not None and not self.window.may_start(match, num_blocks, len(self.running)):
                return budget
            if not self._pool.has_intact_bytes(match):
                continue
            self.waiting.remove(seq)
            self._start(seq, match, num_blocks)
            num_slots += seq.num_slots
            schedule.admitted.append(seq)
            budget -= self._schedule_chunk(seq, schedule, budget)
        return budget

    def _next_waiting(self) -> Sequence:
        first = self.waiting[0]
        if first.status is SequenceStatus.PREEMPTED:  # has had its turn
            return first
        num_running = self._num_running_by_tenant()
        return min(self.waiting, key=lambda seq: num_running[seq.request.tenant_hash])  # of equals, the first to come

    def _num_running_by_tenant(self) -> Counter[bytes]:
        return Counter(seq.request.tenant_hash for seq in self.running)

    def _match(self, seq: Sequence) -> PrefixMatch:
        """What the prefix cache has of it, short of its last token: that one is computed always, for its logits."""
        if not self._config.prefix_caching or not seq.request.use_prefix_cache:
            return NO_MATCH
        size = self._config.block_size
        num_wanted = min(len(seq.block_keys), (seq.num_tokens - 1) // size)
        wanted = [seq.content_of_block(index, size) for index in range(num_wanted)]
        return self._pool.match(wanted, seq.writer.user_hash)

    def _start(self, seq: Sequence, match: PrefixMatch, num_blocks: int) -> None:
        seq.block_table = self._pool.acquire(match, seq.writer)
        if self.window is not None:
            self.window.start(seq, match)
        seq.num_computed_tokens = len(match.blocks) * self._config.block_size
        seq.num_published_blocks = len(match.blocks)
        seq.last_published = match.blocks[-1].identity if match.blocks else None
        seq.block_table.extend(self._pool.allocate(seq.writer).block_id for _ in range(num_blocks))
        seq.set_status(SequenceStatus.RUNNING)
        self._insert_running(seq)

    def _insert_running(self, seq: Sequence) -> None:
        place = len(self.running)
        while place and _order(self.running[place - 1]) > _order(seq):
            place -= 1
        self.running.insert(place, seq)

    def _release(self, seq: Sequence) -> None:
        if self.window is not None:
            self.window.close(seq)
        self._pool.release(reversed(seq.forget_blocks()), seq.writer)


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.arrival, seq.choice
