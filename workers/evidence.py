"""What an engine shows to operators: traces from its event log, its pool's books, its settings. Holds no token."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from cache_service.block_key import BlockKeyer
from cache_service.key_audit import fixed_chain_digest
from cluster.api.evidence import TracedEvent, WorkerEvidence
from cluster.api.ids import RequestId
from workers.counters import engine_counters
from workers.engine import LLMEngine
from workers.event_log import BlockRecord

_PSEUDONYM_BYTES = 6


def inspect(engine: LLMEngine, keyer: BlockKeyer) -> WorkerEvidence:
    """On the step thread, between two steps. Walks over all blocks once."""
    config, pool = engine.config, engine.pool
    settings = {
        "batching": config.batching.value,
        "layout": config.layout.value,
        "prefix_caching": "on" if config.prefix_caching else "off",
        "isolation_check": config.isolation_check.value,
        "checksum_blocks": f"{float(config.checksum_blocks):g}",
        "block_size": str(config.block_size),
        "max_num_seqs": str(engine.scheduler.max_num_seqs),
        "max_num_seqs_limit": str(config.max_num_seqs),
        "max_model_len": str(config.max_model_len),
        "numerics": engine.runner.numerics,
    }
    return WorkerEvidence(
        settings=tuple(settings.items()),
        counters=engine_counters(engine),
        num_blocks=config.num_blocks,
        num_free=pool.num_free,
        num_cached=pool.num_cached,
        num_in_use=pool.num_in_use,
        num_published=len(pool.cache),
        broken_law=_broken_law(engine),
        key_digest=fixed_chain_digest(keyer),
        quarantine_reason=quarantine_reason(engine),
    )


def quarantine_reason(engine: LLMEngine) -> str | None:
    """None while the engine is healthy."""
    if engine.quarantine_reason is not None:
        return engine.quarantine_reason
    if engine.violations:
        first = engine.violations[0]
        return f"structure check: {first.kind.value} in step {first.step_id}, block {first.block_id}"
    return None if engine.is_healthy else "a shared block's checksum did not match"


def trace(records: Iterable[BlockRecord], request_ids: Collection[RequestId]) -> tuple[TracedEvent, ...]:
    """All that happened to the blocks that these requests touched, in every life of them."""
    records = list(records)
    blocks = {record.block_id for record in records if record.request_id in request_ids}
    return tuple(_event(record) for record in records if record.block_id in blocks)


def write_event_log(
    path: Path, engine_records: Sequence[BlockRecord], reason: str, corrupted: Mapping[RequestId, int]
) -> None:
    """As JSON Lines, readable by `watchword trace`: a header, then every event, oldest first. Mode 0600."""
    events = [_event(record) for record in engine_records]
    users = {event.request: event.user for event in events if event.request is not None and event.action == "allocate"}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"users": users, "corrupted": corrupted, "reason": reason}) + "\n")
        for event in events:
            line = {"life": 0, **asdict(event)}
            del line["user"]
            file.write(json.dumps(line) + "\n")


def _event(record: BlockRecord) -> TracedEvent:
    return TracedEvent(
        step=record.step_id,
        time_s=record.time_s,
        action=record.action.value,
        block=record.block_id,
        generation=record.generation,
        request=record.request_id,
        scope=None if record.scope is None else record.scope.name,
        user=None if record.user_hash is None else record.user_hash[:_PSEUDONYM_BYTES].hex(),
    )


def _broken_law(engine: LLMEngine) -> str | None:
    try:
        engine.pool.check_integrity()
    except AssertionError as error:
        return str(error).splitlines()[0] if str(error) else "the books of the block pool do not add up"
    return None
