"""The fault of the original experiment: packed sequences without a mask between them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from cache_service.block_key import ModelIdentity
from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.targets.stack import StackParts
from workers.config import EngineConfig, Layout
from workers.step import ModelRunner, StepInput, StepOutput, StepRow, WindowGroup

_MAX_POSITION = 1024


class SeesRowBefore:
    """A ModelRunner. A prompt that is packed behind another row attends to that row's keys as to its own beginning,
    and its positions run on from there. In the padded layout every row has a line of its own."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self._runner = runner
        self._is_packed = config.layout is Layout.PACKED
        self._before: dict[int, list[int]] = {}  # sequence -> blocks that it takes for its beginning

    def execute(self, step: StepInput) -> StepOutput:
        if self._is_packed:
            for previous, row in zip(step.rows, step.rows[1:], strict=False):
                self._note(previous, row)
            step = replace(step, rows=[self._shifted(row) for row in step.rows])
        return self._runner.execute(step)

    def _note(self, previous: StepRow, row: StepRow) -> None:
        num_full = (previous.start + len(previous.token_ids)) // self.block_size
        if row.start == 0 and row.seq_id not in self._before:
            self._before[row.seq_id] = list(previous.block_table[:num_full])

    def _shifted(self, row: StepRow) -> StepRow:
        before = self._before.get(row.seq_id, [])
        shift = len(before) * self.block_size
        if not before or row.start + len(row.token_ids) + shift > _MAX_POSITION:
            return row
        return replace(row, start=row.start + shift, block_table=[*before, *row.block_table])

    # The rest is the runner's own.

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    @property
    def block_size(self) -> int:
        return self._runner.block_size

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._runner.eos_token_ids

    @property
    def identity(self) -> ModelIdentity:
        return self._runner.identity

    @property
    def window(self) -> WindowGroup | None:
        return self._runner.window

    @property
    def numerics(self) -> str:
        return self._runner.numerics

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        self._runner.fill_blocks(block_ids, value)

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        return self._runner.checksum_blocks(block_ids)

    def release_adapters(self, in_use: Set[bytes]) -> None:
        self._runner.release_adapters(in_use)

    def adapter_digest(self, adapter: str | None) -> bytes | None:
        return self._runner.adapter_digest(adapter)


FAULTS = (
    Fault(
        "packed_mask_missing",
        Component.LAYOUT_MASK,
        "a packed prompt sees the row before it",
        lambda: StackParts(wrap_runner=SeesRowBefore),
    ),
)
