"""Which row counts of a product give each row the bits that it gets in any other count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowPadding:
    """`variant_counts` are the row counts found to differ; a batch is padded past them."""

    variant_counts: frozenset[int] = frozenset()

    def __call__(self, num_rows: int) -> int:
        while num_rows in self.variant_counts:
            num_rows += 1
        return num_rows
