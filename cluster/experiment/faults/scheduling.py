"""Faults of scheduling: preemption and resumption, chunks of a prefill."""

from __future__ import annotations

from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.targets.stack import StackParts
from workers.build import EngineParts
from workers.scheduler import Schedule, ScheduledRow, Scheduler
from workers.sequence import Sequence


class RepeatsTokenOnResume(Scheduler):
    """A preempted sequence comes back with its last output token counted twice."""

    def preempt(self, seq: Sequence) -> None:
        super().preempt(seq)
        if seq.output_token_ids:
            seq.output_token_ids.append(seq.output_token_ids[-1])


class ForgetsOutputOnResume(Scheduler):
    """A preempted sequence comes back with its prompt alone: the old prompt length is used."""

    def preempt(self, seq: Sequence) -> None:
        super().preempt(seq)
        del seq.output_token_ids[:]


class ChunkStartsLate(Scheduler):
    """The second and later chunks of a prefill skip their first token."""

    def _schedule_chunk(self, seq: Sequence, schedule: Schedule, budget: int) -> int:
        num_tokens = super()._schedule_chunk(seq, schedule, budget)
        row: ScheduledRow = schedule.rows[-1]
        is_later_chunk = row.start > seq.num_published_blocks * self._config.block_size or row.start >= 128
        if is_later_chunk and row.num_tokens > 1:
            row.start += 1
            row.num_tokens -= 1
            seq.num_computed_tokens += 1
        return num_tokens


def _with(scheduler: type[Scheduler]) -> StackParts:
    return StackParts(engine=EngineParts(scheduler=scheduler))


FAULTS = (
    Fault(
        "resume_repeats_token",
        Component.SCHEDULER,
        "a preempted sequence resumes with a token twice",
        lambda: _with(RepeatsTokenOnResume),
    ),
    Fault(
        "resume_forgets_output",
        Component.SCHEDULER,
        "a preempted sequence resumes from its prompt",
        lambda: _with(ForgetsOutputOnResume),
    ),
    Fault(
        "chunk_starts_late",
        Component.SCHEDULER,
        "later chunks of a prefill skip a token",
        lambda: _with(ChunkStartsLate),
    ),
)
