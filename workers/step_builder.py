"""From a schedule to the record that the model runner gets."""

from __future__ import annotations

from workers.scheduler import Schedule, ScheduledRow
from workers.step import SampleInput, StepInput, StepRow


class StepBuilder:
    """Stateless: every step is written anew from the sequences, so that no row can inherit another's settings."""

    def build(self, step_id: int, schedule: Schedule) -> StepInput:
        rows = [self.build_row(row) for row in schedule.rows]
        return StepInput(step_id, rows, schedule.block_copies, schedule.page_copies)

    def build_row(self, row: ScheduledRow) -> StepRow:
        seq = row.seq
        return StepRow(
            seq_id=seq.seq_id,
            start=row.start,
            token_ids=seq.tokens(row.start, row.end),
            block_table=seq.block_table,
            samples=self.build_samples(row) if row.is_sampling else (),
            adapter=seq.request.adapter,
            adapter_digest=seq.adapter_digest,
            window_start=seq.window_start,
            window_pages=seq.window_pages,
        )

    def build_samples(self, row: ScheduledRow) -> tuple[SampleInput, ...]:
        """One per choice that starts here; a single one at all later steps."""
        seq = row.seq
        request = seq.request
        return tuple(
            SampleInput(
                params=request.sampling,
                choice=choice,
                position=len(seq.output_token_ids),
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=seq.output_token_ids,
            )
            for choice in (seq.choice, *seq.unforked_choices)
        )
