"""The Triton attention kernel against the naive formula, and a row's bits against chunking, company and placement."""

from __future__ import annotations

from triton_builders import DEVICE, require_triton

require_triton()

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from workers.attention.triton_paged import (  # noqa: E402
    ROWS,
    AttentionInputs,
    AttentionShape,
    check_shape,
    make_groups,
    paged_attention,
)

BLOCK_SIZE, NUM_BLOCKS = 16, 24
LENGTH = 140  # three tiles, the last one ragged


class Sequence:
    """Queries, keys and values of one sequence; its K and V lie in `table`'s blocks."""

    def __init__(self, shape: AttentionShape, length: int, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.query = torch.randn(length, shape.num_heads, shape.head_dim, generator=generator).to(dtype)
        self.kv = torch.randn(2, length, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)

    def write(self, blocks: torch.Tensor, table: list[int], upto: int) -> None:
        for position in range(upto):
            blocks[table[position // BLOCK_SIZE], :, :, position % BLOCK_SIZE] = self.kv[:, position]

    def naive(self, shape: AttentionShape, window: int | None) -> torch.Tensor:
        """softmax(Q Kᵀ · scale) V, the whole matrix at once, in float64. [length, heads, head_dim]"""
        share = shape.num_heads // shape.num_kv_heads
        key, value = (part.double().repeat_interleave(share, dim=1) for part in self.kv)
        scores = torch.einsum("qhd,khd->hqk", self.query.double(), key) * shape.scale
        behind = torch.arange(self.length)[:, None] - torch.arange(self.length)[None, :]
        hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


def attend(
    shape: AttentionShape,
    chunks: list[tuple[Sequence, int, int, list[int]]],  # (sequence, start, end, table)
    window: int | None = None,
    poison: float = float("nan"),
    padding: int = 0,
) -> list[torch.Tensor]:
    """One call of the kernel; what no chunk owns is poison. Returns each chunk's rows [tokens, heads · head_dim]."""
    dtype = chunks[0][0].query.dtype
    blocks = torch.full((NUM_BLOCKS, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim), poison, dtype=dtype)
    for sequence, _, end, table in chunks:
        sequence.write(blocks, table, end)
    query = torch.cat([sequence.query[start:end].flatten(1) for sequence, start, end, _ in chunks])
    query = torch.cat([query, query.new_full((padding, query.shape[1]), poison)])
    row_of = np.repeat(np.arange(len(chunks)), [end - start for _, start, end, _ in chunks])
    row_of = np.append(row_of, np.zeros(padding)).astype(np.int32)
    positions = np.concatenate([*(np.arange(start, end) for _, start, end, _ in chunks), np.full(padding, -1)])
    width = max(len(table) for *_, table in chunks)
    tables = np.zeros((len(chunks), width), dtype=np.int32)
    for index, (*_, table) in enumerate(chunks):
        tables[index, : len(table)] = table
    groups = make_groups(row_of, positions >= 0, shape.tokens_per_group)
    arrays = [torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(DEVICE) for array in
              (tables, *groups, row_of, positions)]  # fmt: skip
    out = paged_attention(query.to(DEVICE), blocks.to(DEVICE), AttentionInputs(*arrays), shape, window).cpu()
    ends = np.cumsum([end - start for _, start, end, _ in chunks])
    return [out[end - (last - first) : end] for end, (_, first, last, _) in zip(ends, chunks, strict=True)]


def table_of(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(NUM_BLOCKS)[:count].tolist()


@pytest.mark.parametrize("window", [None, 21, 64, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 32), (7, 1, 48), (2, 2, 16)])
def test_equals_the_naive_formula(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    shape = AttentionShape(heads, kv_heads, head_dim, BLOCK_SIZE, head_dim**-0.5)
    long, short = Sequence(shape, LENGTH, 1, torch.float32), Sequence(shape, 5, 2, torch.float32)
    table = table_of(10, seed=3)
    parts = attend(shape, [(short, 0, 5, [table[9]]), (long, 0, LENGTH, table[:9])], window, padding=3)
    for sequence, part in zip((short, long), parts, strict=True):
        expected = sequence.naive(shape, window).flatten(1)
        assert (part - expected).abs().max() < 2e-6
    unlimited = long.naive(shape, None).flatten(1)
    assert window is None or (parts[1] - unlimited).abs().max() > 1e-2, "a window that hides nothing tests nothing"


def test_float16_equals_the_naive_formula_up_to_its_rounding() -> None:
    shape = AttentionShape(4, 2, 32, BLOCK_SIZE, 32**-0.5)
    sequence = Sequence(shape, LENGTH, 1, torch.float16)
    [part] = attend(shape, [(sequence, 0, LENGTH, table_of(9, seed=3))])
    assert (part.double() - sequence.naive(shape, None).flatten(1)).abs().max() < 5e-3


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_chunking_company_and_placement_leave_no_trace(dtype: torch.dtype, window: int | None) -> None:
    shape = AttentionShape(6, 2, 32, BLOCK_SIZE, 32**-0.5)
    sequence, other = Sequence(shape, LENGTH, 1, dtype), Sequence(shape, 60, 2, dtype)
    [whole] = attend(shape, [(sequence, 0, LENGTH, table_of(9, seed=3))], window)
    for seed, poison, cut in ((4, float("nan"), 1), (5, float("inf"), 64), (6, 3e4, 65), (7, float("nan"), 139)):
        tables = table_of(13, seed)
        mine, others = tables[:9], tables[9:]
        [first] = attend(shape, [(sequence, 0, cut, mine)], window, poison)
        chunks = [(other, 0, 60, others), (sequence, cut, LENGTH, mine)]
        rest = attend(shape, chunks, window, poison, padding=cut % 5)[1]
        assert torch.equal(torch.cat([first, rest]), whole), (seed, cut)


def test_a_decode_row_has_the_bits_of_its_prefill_row() -> None:
    shape = AttentionShape(6, 2, 32, BLOCK_SIZE, 32**-0.5)
    sequence = Sequence(shape, LENGTH, 1, torch.float32)
    table = table_of(9, seed=3)
    [whole] = attend(shape, [(sequence, 0, LENGTH, table)])
    for position in (0, 1, 15, 63, 64, 128, 139):
        [row] = attend(shape, [(sequence, position, position + 1, table)])
        assert torch.equal(row[0], whole[position]), position


def test_another_value_in_the_context_is_felt() -> None:
    """The tests above can fail: one changed number of one early token changes the last row."""
    shape = AttentionShape(6, 2, 32, BLOCK_SIZE, 32**-0.5)
    sequence = Sequence(shape, LENGTH, 1, torch.float32)
    [whole] = attend(shape, [(sequence, 0, LENGTH, table_of(9, seed=3))])
    sequence.kv[1, 7, 0, 0] += 1.0
    [changed] = attend(shape, [(sequence, 0, LENGTH, table_of(9, seed=3))])
    assert not torch.equal(changed[-1], whole[-1])
    assert torch.equal(changed[6], whole[6]), "a token that comes later must not"


def test_groups_hold_runs_of_one_sequence() -> None:
    row_of = np.asarray([0] * 5 + [1] + [2] * 3 + [0] * 2, dtype=np.int32)
    is_active = np.asarray([1] * 5 + [1] + [1, 0, 1] + [0] * 2, dtype=bool)
    first, count = make_groups(row_of, is_active, 2)
    assert list(zip(first.tolist(), count.tolist(), strict=True)) == [(0, 2), (2, 2), (4, 1), (5, 1), (6, 1), (8, 1)]
    assert make_groups(row_of, is_active & False, 2)[0].size == 0


def test_too_many_query_heads_for_a_program_are_refused() -> None:
    check_shape(AttentionShape(ROWS, 1, 16, BLOCK_SIZE, 1.0))
    with pytest.raises(ValueError, match="128 query heads"):
        check_shape(AttentionShape(128, 1, 16, BLOCK_SIZE, 1.0))
