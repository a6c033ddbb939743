"""What sharing yields and what safety costs, on real pairs of prompts.

`python tests/isolation/sharing_report.py [EVERY]`; with EVERY, only each EVERY-th pair of the data folder is taken.

Each pair is one user's prompt after another's, all variables shared. Hits: pairs in which the second user takes at
least one block. The unsafe bound shares every block whose tokens agree, whoever wrote them and whatever they depend on.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from prompt_data import SAMPLE, PromptData, Record, types_of, whole_folder
from prompt_rig import BLOCK_SIZE, PromptRig

from cluster.api.prompt import PromptRef
from cluster.prompts.canonical import num_equal
from cluster.prompts.policy import Granularity, Share

POLICIES = (Share.VARIABLES, Share.TEMPLATE, Share.USER)


@dataclass
class Row:
    """Sums over pairs."""

    num_pairs: int = 0
    num_hits: int = 0
    num_shared_tokens: int = 0
    num_prompt_tokens: int = 0

    def add(self, num_blocks: int, num_prompt_tokens: int) -> None:
        self.num_pairs += 1
        self.num_hits += num_blocks > 0
        self.num_shared_tokens += num_blocks * BLOCK_SIZE
        self.num_prompt_tokens += num_prompt_tokens

    def cells(self, bound: Row) -> str:
        of_prompt = self.num_shared_tokens / self.num_prompt_tokens
        of_bound = self.num_shared_tokens / bound.num_shared_tokens
        hit_rate = self.num_hits / self.num_pairs
        return f"{hit_rate:.1%} | {self.num_shared_tokens:,} | {of_prompt:.1%} | {of_bound:.1%}"


def measure(data: PromptData, pairs: Sequence[Record], granularity: Granularity, root: Path) -> dict[Share | None, Row]:
    """Sums for each policy; None stands for the unsafe bound."""
    rig = PromptRig(root)
    used = {pair["template_id"] for pair in pairs}
    for record in (data.templates[template_id] for template_id in sorted(used)):
        rig.put(
            record["template"],
            shared=record["variables"],
            types=types_of(record),
            template_id=record["id"],
            granularity=granularity.value,
        )
    rows: dict[Share | None, Row] = {share: Row() for share in (*POLICIES, None)}
    for pair in pairs:
        for share in POLICIES:
            left, right = (
                rig.ask_with(
                    rig.caller(side), PromptRef(pair["template_id"], None, data.values(pair, side)), share=share
                )
                for side in ("a", "b")
            )
            rows[share].add(rig.num_shared(left, right), len(right.token_ids))
        rows[None].add(num_equal(left.token_ids, right.token_ids) // BLOCK_SIZE, len(right.token_ids))
    rig.catalog.sandbox.close()
    return rows


def main() -> None:
    data = PromptData(whole_folder() if whole_folder().is_dir() else SAMPLE)
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    pairs = data.read("pairs")[::every]
    num_templates = len({pair["template_id"] for pair in pairs})
    print(f"{len(pairs)} pairs of {num_templates} templates, blocks of {BLOCK_SIZE} tokens\n")
    print("| policy | granularity | pairs with a hit | shared tokens | of all prompt tokens | of the unsafe bound |")
    print("| --- | --- | --- | --- | --- | --- |")
    for granularity in Granularity:
        with tempfile.TemporaryDirectory() as root:
            rows = measure(data, pairs, granularity, Path(root))
        bound = rows[None]
        for share in POLICIES:
            print(f"| `{share.value}` | {granularity.value} | {rows[share].cells(bound)} |", flush=True)
    print(f"| tokens alone, unsafe | block | {bound.cells(bound)} |")


if __name__ == "__main__":
    main()
