"""Does a row feel its neighbours? Runs known tokens through the live runner alone and in company, and compares bits.

Company is tried twice, with other tokens of the same lengths. An answer that changes with the neighbours' content sees
their keys: a mask or a block table is wrong. One that differs from the lonely answer but not between the companies is
placed by them: positions are wrong, or, in a padded batch, padding is seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from cluster.api.evidence import LayoutEvidence
from cluster.api.ids import RequestId
from cluster.api.sampling import SamplingParams
from workers.block import BlockWriter
from workers.config import Layout
from workers.engine import LLMEngine
from workers.step import ModelRunner, SampledToken, SampleInput, StepInput, StepRow
from workers.window_pages import WindowPages

_PARAMS = SamplingParams(max_tokens=1, seed=0, temperature=0.0, logprobs=8)
_STALE = 3.0  # what the scratch blocks hold before each scene, so that a read of unwritten slots shows
_NOBODY = BlockWriter(RequestId("layout-audit"), bytes(32), 0)


def audit_layout(engine: LLMEngine) -> LayoutEvidence:
    """On the step thread, between two steps. Takes a few blocks of the pool for its duration."""
    size = engine.config.block_size
    scenes = _Scenes(engine.runner, size, engine.pool.pages)
    if scenes.num_tokens > engine.config.max_num_batched_tokens:
        return LayoutEvidence(0, (), (), f"a step of {engine.config.max_num_batched_tokens} tokens is too small")
    # The first and the last block are where padding goes by mistake: watched, so not to be written by the scenes.
    watched = (0, engine.runner.num_blocks - 1)
    wanted = scenes.num_blocks + len(watched)
    pages = engine.pool.pages
    if not engine.pool.can_allocate(wanted) or (pages is not None and pages.num_available < wanted):
        return LayoutEvidence(0, (), (), "no blocks are free")
    blocks = [engine.pool.allocate(_NOBODY) for _ in range(wanted)]
    block_ids = [block.block_id for block in blocks]
    if pages is not None:
        for block in blocks:
            pages.assign(block)
    try:
        rows = [block for block in block_ids if block not in watched]
        owned = [block for block in watched if block in block_ids]
        return scenes.compare(rows, watched, owned, is_padded=engine.config.layout is Layout.PADDED)
    finally:
        if pages is not None:
            for block in blocks:
                pages.let_go(block)
        engine.pool.release(reversed(block_ids), _NOBODY)


@dataclass(frozen=True, slots=True)
class _Part:
    """A row's tokens and its own blocks."""

    tokens: tuple[int, ...]
    table: tuple[int, ...]
    pages: tuple[int, ...]

    def row(self, number: int, start: int, end: int) -> StepRow:
        tokens = self.tokens[start:end]
        sample = SampleInput(_PARAMS, 0, 0, self.tokens[:end], ())
        return StepRow(number, start, tokens, self.table, (sample,), window_pages=self.pages)


_Answer = list[list[SampledToken]]
_Scene = Callable[[_Part, Sequence[_Part]], _Answer]


class _Effect(Enum):
    """What company does to a row."""

    NONE = "none"
    CONTENT = "the content of a neighbour changes the row"
    PLACE = "company changes the row, whatever it says"


class _Scenes:
    def __init__(self, runner: ModelRunner, block_size: int, pages: WindowPages | None) -> None:
        self._runner = runner
        self._pages = pages
        self._size = block_size
        self._subject = block_size + block_size // 2 + 3
        self._unequal = (5, self._subject + 6)  # one shorter, one longer: padded, the subject is not the longest row
        self._num_comparisons = 0

    @property
    def num_tokens(self) -> int:
        return 3 * max(self._unequal)

    @property
    def num_blocks(self) -> int:
        return 3 * self._blocks_of(max(self._unequal) + 1)

    def compare(
        self, block_ids: Sequence[int], watched: Sequence[int], owned: Sequence[int], *, is_padded: bool
    ) -> LayoutEvidence:
        """`watched` are blocks that no row has; those of them in `owned` may be overwritten."""
        self._runner.fill_blocks(owned, _STALE)
        before = self._runner.checksum_blocks(watched)
        scenes = {"prefill": self._prefill, "prefill after a hit": self._tail, "decode": self._decode}
        effects = {name: self._effect(scene, block_ids) for name, scene in scenes.items()}
        writes_outside = before != self._runner.checksum_blocks(watched)
        # Padded, each row has a line of its own: what moves a row that starts at 0 there can only be its padding.
        is_padding = is_padded and (writes_outside or effects["prefill"] is _Effect.PLACE)
        masks = [f"{name}: {effect.value}" for name, effect in effects.items() if effect is _Effect.CONTENT]
        placed = [name for name, effect in effects.items() if effect is _Effect.PLACE]
        if is_padding:
            masks += [f"{name}: padding changes the row" for name in placed]
        if writes_outside:
            masks.append("padding is written to a block of another")
        return LayoutEvidence(self._num_comparisons, () if is_padding else tuple(placed), tuple(masks))

    def _effect(self, scene: _Scene, block_ids: Sequence[int]) -> _Effect:
        alone = self._play(scene, block_ids, (), content=0)
        first, second = (self._play(scene, block_ids, self._unequal, content) for content in (1, 2))
        self._num_comparisons += 2
        if first != second:
            return _Effect.CONTENT
        return _Effect.NONE if first == alone else _Effect.PLACE

    def _play(self, scene: _Scene, block_ids: Sequence[int], lengths: Sequence[int], content: int) -> _Answer:
        """The subject's tokens are always the same, its neighbours' depend on `content`."""
        self._runner.fill_blocks(block_ids, _STALE)
        ids = iter(block_ids)
        parts = [
            self._part(self._tokens(length + 1, seed), tuple(next(ids) for _ in range(self._blocks_of(length + 1))))
            for length, seed in ((self._subject, 0), *((length, content * 10 + i) for i, length in enumerate(lengths)))
        ]
        return scene(parts[0], parts[1:])

    def _part(self, tokens: tuple[int, ...], table: tuple[int, ...]) -> _Part:
        pages = () if self._pages is None else tuple(self._pages.of_block[block] for block in table)
        return _Part(tokens, table, pages)

    def _prefill(self, subject: _Part, others: Sequence[_Part]) -> _Answer:
        return self._step(subject, others, 0, self._subject)

    def _tail(self, subject: _Part, others: Sequence[_Part]) -> _Answer:
        """The first block is computed alone, as a cached prefix is."""
        self._step(subject, (), 0, self._size)
        return self._step(subject, others, self._size, self._subject)

    def _decode(self, subject: _Part, others: Sequence[_Part]) -> _Answer:
        for part in (subject, *others):
            self._step(part, (), 0, len(part.tokens) - 1)
        return self._step(subject, others, self._subject, self._subject + 1, is_decode=True)

    def _step(
        self, subject: _Part, others: Sequence[_Part], start: int, end: int, *, is_decode: bool = False
    ) -> _Answer:
        """One neighbour before the subject, the others behind it; the subject's samples."""
        rows = [
            part.row(
                number,
                len(part.tokens) - 1 if is_decode else 0,
                len(part.tokens) if is_decode else len(part.tokens) - 1,
            )
            for number, part in enumerate(others, start=1)
        ]
        rows.insert(min(1, len(rows)), subject.row(0, start, end))
        sampled = self._runner.execute(StepInput(0, rows)).sampled
        return [sampled[min(1, len(rows) - 1)]]

    def _tokens(self, count: int, seed: int) -> tuple[int, ...]:
        draw = random.Random(seed)
        return tuple(draw.randrange(self._runner.vocab_size) for _ in range(count))

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)
