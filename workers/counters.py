"""What an engine counted since it started, by name: for metrics and for the checks that look at a live cluster."""

from __future__ import annotations

from workers.engine import LLMEngine


def engine_counters(engine: LLMEngine) -> tuple[tuple[str, int], ...]:
    """Call it on the step thread. Counts are of blocks where a name says nothing else."""
    cache = engine.pool.cache.counters
    return (
        ("prefix_cache_hits", cache.hits),
        ("prefix_cache_misses", cache.misses),
        ("prefix_cache_evictions", cache.evictions),
        ("verify_failures", cache.verify_failures),
        ("checksum_failures", cache.checksum_failures),
        ("isolation_violations", len(engine.violations)),
        ("publish_conflicts", cache.publish_conflicts),
        ("quarantined", int(not engine.is_healthy)),
        ("max_num_seqs", engine.scheduler.max_num_seqs),
        ("preemptions", engine.scheduler.num_preemptions),
        ("steps", engine.meter.num_steps),
        ("step_tokens", engine.meter.num_tokens),
    )
