"""The conditions of `--matrix`: one thing varied at a time, each with what it must show to count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cluster.experiment.condition import Condition, default_engine
from cluster.experiment.targets.house_rules import REGIONS
from cluster.experiment.verdict import Requirements
from cluster.experiment.workload import Workload
from workers.config import Batching, EngineConfig, IsolationCheck, Layout

_LARGE_FINITE = 3.0e4  # in every KV format finite, and far outside what a model writes


def matrix(base: Workload, long_words: int = 900) -> list[Condition]:
    """All conditions; `base` gives wordings and lengths. `long_words` make a prompt of some 1,000 tokens."""
    return [*_traffic(base, long_words), *_engine_modes(base), *_pressure(base)]


def _traffic(base: Workload, long_words: int) -> Iterator[Condition]:
    def condition(name: str, engine: EngineConfig | None = None, **changes: object) -> Condition:
        load = replace(base, **changes)  # type: ignore[arg-type]
        return Condition(name, engine or default_engine(), load)

    yield condition("baseline")
    # The short one must still be answering when the long one has been read, many chunks later.
    yield condition(
        "lengths 10 against 1,000 tokens",
        context_words=(0, long_words),
        arrival_gap_steps=0,
        max_tokens=64,
        ignore_eos=True,
    )
    for percent in (0, 50, 100):
        name = f"prefix similarity {percent} %"
        yield condition(name, context_words=(60, 60), prefix_similarity=percent / 100)
    for concurrency in (8, 16, 64):
        engine = replace(default_engine(), max_num_seqs=max(8, concurrency))
        yield condition(
            f"concurrency {concurrency}", engine, concurrency=concurrency, num_fillers=0, arrival_gap_steps=0
        )
    yield condition("abort storm", num_fillers=6, abort_fraction=1.0)
    yield condition("mixed sampling", mixed_sampling=True)
    yield condition("all streaming", stream=True)
    yield condition("none streaming", stream=False)
    yield condition("multi-turn, marker four turns ago", num_turns=4)
    yield condition("registered template, shared variables", regions=REGIONS, concurrency=4)
    yield condition("two sessions of one user", num_sessions=2, context_words=(60, 60), prefix_similarity=1.0)
    yield replace(condition("two workers", num_fillers=4, concurrency=4), num_workers=2)
    yield replace(condition("worker restart"), restart_every=2)
    indexed = condition("two workers behind the index, restarts", num_fillers=4, concurrency=4)
    yield replace(indexed, num_workers=2, restart_every=3, has_index=True)


def _engine_modes(base: Workload) -> Iterator[Condition]:
    engine = default_engine()
    poison = replace(engine, isolation_check=IsolationCheck.POISON)
    yield Condition("prefix cache off", replace(engine, prefix_caching=False), base)
    yield Condition("padded layout", replace(engine, layout=Layout.PADDED), base)
    yield Condition("poisoned memory, NaN", poison, base)
    yield Condition("poisoned memory, large finite", replace(poison, poison_value=_LARGE_FINITE), base)
    # Static batches start together or not at all: everything arrives at once, and one step takes all prompts in.
    static = replace(engine, batching=Batching.STATIC, max_num_batched_tokens=2048, max_shared_prefill_tokens=2048)
    together = replace(base, arrival_gap_steps=0, num_fillers=0, concurrency=3)
    yield Condition("static batching", static, together)


def _pressure(base: Workload) -> Iterator[Condition]:
    """Pools so small that blocks are evicted, and running requests preempted."""
    engine = default_engine()
    evicting = Requirements(allow_pressure=True, needs_evictions=True)
    yield Condition("pool pressure: evictions", replace(engine, num_blocks=72), base, evicting)
    # Long answers outgrow the reserve of one block a sequence that admission keeps.
    crowded = replace(
        base, concurrency=6, num_fillers=2, arrival_gap_steps=0, ignore_eos=True, max_tokens=96, filler_max_tokens=96
    )
    preempting = replace(evicting, needs_preemptions=True)
    yield Condition("pool pressure: preemptions", replace(engine, num_blocks=72), crowded, preempting)
