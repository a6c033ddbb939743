"""Picks the sample in tests/isolation/data: `python tests/isolation/make_prompt_sample.py` beside the data folder.

Only records whose licence lets them be passed on (CC0-1.0, MIT, Apache-2.0) and that are short.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable

from prompt_data import SAMPLE, PromptData, Record, whole_folder

FREE = frozenset({"CC0-1.0", "MIT", "Apache-2.0", "Apache-2.0 (question text)"})
MAX_BYTES = 6000


def pick(records: Iterable[Record], kind_of: Callable[[Record], str], per_kind: int) -> list[Record]:
    """The first few free and short records of each kind."""
    seen: Counter[str] = Counter()
    picked = []
    for record in records:
        kind = kind_of(record)
        if record.get("licence", "MIT") in FREE and len(json.dumps(record)) < MAX_BYTES and seen[kind] < per_kind:
            seen[kind] += 1
            picked.append(record)
    return picked


def main() -> None:
    data = PromptData(whole_folder())
    templates = pick(
        data.templates.values(), lambda record: f"{record['source']}{record['early_variable']}"[:40], per_kind=2
    )
    names = {record["id"] for record in templates}
    pairs = [pair for pair in data.read("pairs") if pair["template_id"] in names]
    kinds = {pair["kind"] for pair in data.read("pairs")} - {pair["kind"] for pair in pairs}
    for kind in sorted(kinds):  # a template more for each kind of pair that is not there yet
        for pair in data.read("pairs"):
            template = data.templates[pair["template_id"]]
            if pair["kind"] == kind and template["licence"] in FREE and len(json.dumps(template)) < MAX_BYTES:
                templates += [template] if template["id"] not in names else []
                names.add(template["id"])
                pairs.append(pair)
                break
    files = {
        "templates": templates,
        "pairs": pick(pairs, lambda pair: pair["kind"], per_kind=8),
        "twins": pick(data.read("twins"), lambda twin: twin["kind"], per_kind=1),
        "tricky": pick(data.read("tricky"), lambda text: text["category"], per_kind=3),
        "chat_templates": pick(data.read("chat_templates"), lambda _: "", per_kind=3),
        "template_vectors": pick(data.read("template_vectors"), lambda vector: vector["kind"], per_kind=12),
        "conversations": pick(data.read("conversations"), lambda record: record["lang"], per_kind=4),
    }
    SAMPLE.mkdir(exist_ok=True)
    for name, records in files.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (SAMPLE / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{name}: {len(records)} records, {len(lines)} bytes")


if __name__ == "__main__":
    main()
