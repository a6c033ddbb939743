"""What the scripts of the index answer, as records. Whoever can write Redis decides what stands here."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.api.ids import WorkerId

SLOT_END = 1 << 32


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker as Redis knows it."""

    epoch: str
    slot: int
    sequence: int
    expires_ms: int


@dataclass(frozen=True, slots=True)
class IndexStatus:
    """`incarnation` changes when Redis lost its data, `run_id` when its server did; `last_id` is the newest entry's."""

    now_ms: int
    workers: dict[WorkerId, WorkerRecord]
    incarnation: str
    run_id: str
    last_id: str
    slots_to_sweep: tuple[int, ...]

    def alive(self) -> dict[WorkerId, WorkerRecord]:
        """Those whose lease holds."""
        return {name: each for name, each in self.workers.items() if each.expires_ms >= self.now_ms}


def leading(owners_by_block: Iterator[Sequence[int]], alive: dict[int, WorkerId]) -> dict[WorkerId, int]:
    depths: dict[int, int] = {}
    holders = set(alive)
    for depth, slots in enumerate(owners_by_block, 1):
        holders.intersection_update(slots)
        if not holders:
            break
        for slot in holders:
            depths[slot] = depth
    return {alive[slot]: depth for slot, depth in depths.items()}


def parse_owners(packed: bytes) -> Iterator[tuple[int, ...]]:
    at = 0
    while at < len(packed):
        count = packed[at]
        yield struct.unpack_from(f"<{count}I", packed, at + 1)
        at += 1 + 4 * count


def parse_dump(packed: bytes) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    at = 0
    while at < len(packed):
        count = packed[at + 8]
        yield packed[at : at + 8], struct.unpack_from(f"<{count}I", packed, at + 9)
        at += 9 + 4 * count


def parse_workers(flat: list[bytes]) -> dict[WorkerId, WorkerRecord]:
    workers = {}
    for name, text in zip(flat[::2], flat[1::2], strict=True):
        parts = text.decode(errors="replace").split(":")
        if len(parts) == 5 and all(part.isdecimal() and len(part) < 20 for part in parts[1:]):
            epoch, slot, sequence, _, expires = parts
            if int(slot) >= SLOT_END:
                continue
            workers[WorkerId(name.decode(errors="replace"))] = WorkerRecord(
                epoch, int(slot), int(sequence), int(expires)
            )
    return workers


def parse_status(reply: list) -> IndexStatus:
    now, flat, incarnation, run_id, last_id, due = reply
    slots = tuple(int(slot) for slot in due if slot.isdigit() and int(slot) < SLOT_END)
    story, run = incarnation.decode(errors="replace"), run_id.decode(errors="replace")
    return IndexStatus(int(now), parse_workers(flat), story, run, last_id.decode(), slots)


def streams_of(reply: list | None) -> list:
    return reply or []


def entry_payload(fields: list[bytes] | dict[bytes, bytes] | None) -> bytes:
    if not fields:
        return b""
    pairs = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=False))
    return pairs.get(b"b", b"")
