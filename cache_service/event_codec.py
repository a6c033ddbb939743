"""The bytes of one stream entry. Whoever can write Redis can write anything here: decoding checks every length."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cache_service.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, EventBatch, Snapshot
from cache_service.fingerprints import FINGERPRINT_BYTES, fingerprint, unpack
from cluster.api.ids import BlockKey, WorkerId

CODEC_VERSION = 1
MAX_NAME_BYTES = 255

_HEAD = struct.Struct("<BcBBQ")  # version, kind, bytes of worker id, bytes of epoch, sequence
_EVENT = struct.Struct("<cI")  # kind, number of fingerprints
_BATCH, _SNAPSHOT, _STORED_SNAPSHOT, _DROPPED = b"B", b"S", b"M", b"D"
_STORED, _REMOVED, _CLEARED = b"+", b"-", b"0"


@dataclass(frozen=True, slots=True)
class SnapshotStored:
    """A snapshot too long for the stream: the entries of the worker's slot are it."""

    worker_id: WorkerId
    epoch: str
    sequence: int


@dataclass(frozen=True, slots=True)
class WorkerDropped:
    worker_id: WorkerId
    epoch: str


StreamEntry = EventBatch | Snapshot | SnapshotStored | WorkerDropped


def encode(entry: StreamEntry) -> bytes:
    """Keys are cut to fingerprints. Raises ValueError for a worker id or epoch that no index can hold."""
    match entry:
        case EventBatch():
            return _head(_BATCH, entry, entry.sequence) + b"".join(map(_encode_event, entry.events))
        case Snapshot():
            return _head(_SNAPSHOT, entry, entry.sequence) + b"".join(map(fingerprint, entry.keys))
        case SnapshotStored():
            return _head(_STORED_SNAPSHOT, entry, entry.sequence)
        case WorkerDropped():
            return _head(_DROPPED, entry, 0)


def decode(payload: bytes) -> StreamEntry:
    """Raises ValueError for anything that `encode` cannot have made."""
    try:
        version, kind, worker_size, epoch_size, sequence = _HEAD.unpack_from(payload)
    except struct.error as error:
        raise ValueError(f"stream entry of {len(payload)} bytes is too short") from error
    if version != CODEC_VERSION:
        raise ValueError(f"stream entry has version {version}, known is {CODEC_VERSION}")
    names = payload[_HEAD.size : _HEAD.size + worker_size + epoch_size]
    if len(names) < worker_size + epoch_size:
        raise ValueError("stream entry ends within its names")
    worker_id, epoch = WorkerId(names[:worker_size].decode()), names[worker_size:].decode()
    check_names(worker_id, epoch)
    rest = payload[_HEAD.size + worker_size + epoch_size :]
    match kind:
        case b"B":
            return EventBatch(worker_id, epoch, sequence, _decode_events(rest))
        case b"S":
            return Snapshot(worker_id, epoch, sequence, unpack(rest))
        case b"M":
            return SnapshotStored(worker_id, epoch, sequence)
        case b"D":
            return WorkerDropped(worker_id, epoch)
        case _:
            raise ValueError(f"stream entry has unknown kind {kind!r}")


def check_names(worker_id: str, epoch: str) -> None:
    for name, value in (("worker id", worker_id), ("epoch", epoch)):
        if not 1 <= len(value.encode()) <= MAX_NAME_BYTES:
            raise ValueError(f"{name} has {len(value.encode())} bytes, allowed are 1 to {MAX_NAME_BYTES}")
    if ":" in epoch:
        raise ValueError("an epoch holds no colon")


def _head(kind: bytes, entry: StreamEntry, sequence: int) -> bytes:
    check_names(entry.worker_id, entry.epoch)
    worker, epoch = entry.worker_id.encode(), entry.epoch.encode()
    return _HEAD.pack(CODEC_VERSION, kind, len(worker), len(epoch), sequence) + worker + epoch


def _encode_event(event: BlockEvent) -> bytes:
    match event:
        case BlockStored(keys):
            return _EVENT.pack(_STORED, len(keys)) + b"".join(map(fingerprint, keys))
        case BlockRemoved(keys):
            return _EVENT.pack(_REMOVED, len(keys)) + b"".join(map(fingerprint, keys))
        case AllBlocksCleared():
            return _EVENT.pack(_CLEARED, 0)


def _decode_events(rest: bytes) -> tuple[BlockEvent, ...]:
    events: list[BlockEvent] = []
    at = 0
    while at < len(rest):
        if len(rest) < at + _EVENT.size:
            raise ValueError("stream entry ends within an event")
        kind, count = _EVENT.unpack_from(rest, at)
        at += _EVENT.size
        end = at + count * FINGERPRINT_BYTES
        if len(rest) < end:
            raise ValueError("stream entry ends within its fingerprints")
        events.append(_event(kind, unpack(rest[at:end])))
        at = end
    return tuple(events)


def _event(kind: bytes, keys: tuple[BlockKey, ...]) -> BlockEvent:
    match kind:
        case b"+":
            return BlockStored(keys)
        case b"-":
            return BlockRemoved(keys)
        case b"0":
            return AllBlocksCleared()
        case _:
            raise ValueError(f"stream entry has an event of unknown kind {kind!r}")
