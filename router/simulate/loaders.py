"""Recorded traces: Mooncake's JSON Lines and Azure's CSV, told apart by content."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from router.simulate.trace import TraceRequest, spread_buckets

MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def load_trace(path: Path, *, block_size_tokens: int = MOONCAKE_BLOCK_TOKENS) -> list[TraceRequest]:
    """Requests in order of arrival, the first at 0 s. Raises ValueError with file and line for what cannot be read.

    Azure's traces say nothing of prefixes: their blocks are all different.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline().strip()
        file.seek(0)
        if first.startswith("{"):
            requests = [_mooncake(path, number, line) for number, line in enumerate(file, 1) if line.strip()]
        elif all(column in first for column in _AZURE_COLUMNS):
            fresh = count()
            requests = [
                _azure(path, number, row, block_size_tokens, fresh)
                for number, row in enumerate(csv.DictReader(file), 2)
            ]
        else:
            raise ValueError(f"{path}: neither Mooncake JSON Lines nor Azure CSV: it begins with {first[:60]!r}")
    return _from_zero(requests)


def _mooncake(path: Path, number: int, line: str) -> TraceRequest:
    try:
        record: dict[str, Any] = json.loads(line)
        return TraceRequest(
            arrival_s=float(record["timestamp"]) / 1000.0,
            num_prompt_tokens=int(record["input_length"]),
            num_output_tokens=int(record["output_length"]),
            block_ids=tuple(int(block_id) for block_id in record["hash_ids"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number}: not a Mooncake record ({type(error).__name__}: {error})") from None


def _azure(path: Path, number: int, row: dict[str, str], block_size_tokens: int, fresh: count[int]) -> TraceRequest:
    try:
        num_prompt = int(row["ContextTokens"])
        num_blocks = -(-num_prompt // block_size_tokens)
        return TraceRequest(
            arrival_s=_timestamp_s(row["TIMESTAMP"]),
            num_prompt_tokens=num_prompt,
            num_output_tokens=int(row["GeneratedTokens"]),
            block_ids=tuple(next(fresh) for _ in range(num_blocks)),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number}: not an Azure record ({type(error).__name__}: {error})") from None


def _timestamp_s(text: str) -> float:
    """ISO date and time; Azure writes seven digits of a second, one more than Python reads."""
    whole, _, fraction = text.strip().partition(".")
    fraction = fraction.partition("+")[0]
    return datetime.fromisoformat(whole + "+00:00").timestamp() + (float("0." + fraction) if fraction else 0.0)


def _from_zero(requests: list[TraceRequest]) -> list[TraceRequest]:
    if not requests:
        raise ValueError("the trace holds no requests")
    start_s = min(request.arrival_s for request in requests)
    shifted = [replace(request, arrival_s=request.arrival_s - start_s) for request in requests]
    return spread_buckets(sorted(shifted, key=lambda request: request.arrival_s))
