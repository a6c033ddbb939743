"""Lines judged from GET /v1/evidence: what the gateway and every worker say of their own books."""

from __future__ import annotations

from typing import Any

from cluster.checks.line import CheckLine, line

Evidence = dict[str, Any]
Worker = dict[str, Any]

# A pool that cannot hold a full batch of requests of this part of the context works by evicting and recomputing.
CONTEXT_SHARE = 0.25


def inside_lines(evidence: Evidence) -> list[CheckLine]:
    workers = [worker for worker in evidence["workers"] if "unreachable" not in worker]
    return [
        _workers(evidence["workers"]),
        _positions(workers),
        _mask(workers),
        _reference_counts(workers),
        _eviction_pressure(workers),
        _restart(workers),
    ]


def key_faults(evidence: Evidence) -> list[str]:
    """What is wrong with how keys are derived; the behaviour is looked at from outside."""
    gateway = evidence["gateway"]
    faults = [f"the {name} can change without changing the key" for name in gateway["fields_missing_in_key"]]
    for worker in evidence["workers"]:
        if "books" in worker and worker["books"]["key_digest"] != gateway["key_digest"]:
            faults.append(f"{worker['worker']} derives other keys than the gateway")
    return faults


def _workers(workers: list[Worker]) -> CheckLine:
    faults = [f"{worker['worker']} cannot be reached" for worker in workers if "unreachable" in worker]
    for worker in workers:
        if "books" in worker and worker["books"]["quarantine_reason"]:
            faults.append(f"{worker['worker']} is quarantined: {worker['books']['quarantine_reason']}")
    if not workers:
        faults.append("there is no worker")
    return line("workers", faults, f"{len(workers)} reachable, none quarantined")


def _positions(workers: list[Worker]) -> CheckLine:
    faults = _not_done(workers)
    for worker in workers:
        for scene in worker["layout"]["position_faults"]:
            faults.append(f"{worker['worker']}: in company a row's {scene} starts at another position than alone")
        if worker["numerics"].startswith("inexact"):
            faults.append(f"{worker['worker']} is not bit-exact: its self-test failed or was switched off")
    return line("positions per request", faults, _comparisons(workers))


def _mask(workers: list[Worker]) -> CheckLine:
    faults = _not_done(workers)
    faults += [f"{worker['worker']}: {fault}" for worker in workers for fault in worker["layout"]["mask_faults"]]
    return line("mask for padding and packing", faults, _comparisons(workers))


def _reference_counts(workers: list[Worker]) -> CheckLine:
    faults = _none_seen(workers)
    for worker in workers:
        books = worker["books"]
        if books["broken_law"]:
            faults.append(f"{worker['worker']}: {books['broken_law']}")
        elif books["num_free"] + books["num_cached"] + books["num_in_use"] != books["num_blocks"]:
            faults.append(f"{worker['worker']}: free, cached and used blocks do not add up")
        if violations := books["counters"]["isolation_violations"]:
            faults.append(f"{worker['worker']}: {violations} violations of the structure check")
        if books["settings"]["isolation_check"] == "off":
            faults.append(f"{worker['worker']}: the structure check is off")
    shown = ", ".join(
        "{num_free} free + {num_cached} cached + {num_in_use} in use = {num_blocks}".format_map(worker["books"])
        for worker in workers
    )
    return line("reference counts", faults, shown)


def _eviction_pressure(workers: list[Worker]) -> CheckLine:
    faults, shown = _none_seen(workers), []
    for worker in workers:
        settings, counters = worker["books"]["settings"], worker["books"]["counters"]
        num_tokens = worker["books"]["num_blocks"] * int(settings["block_size"])
        wanted = int(int(settings["max_num_seqs"]) * int(settings["max_model_len"]) * CONTEXT_SHARE)
        if num_tokens < wanted:
            faults.append(
                f"{worker['worker']}: the pool holds {num_tokens} tokens, {settings['max_num_seqs']} requests of "
                f"{CONTEXT_SHARE:.0%} of the context need {wanted}"
            )
        if counters["preemptions"]:
            faults.append(f"{worker['worker']}: {counters['preemptions']} requests were preempted for want of blocks")
        shown.append(f"{num_tokens} tokens, {counters['prefix_cache_evictions']} evictions, no preemption")
    return line("eviction pressure", faults, "; ".join(shown))


def _restart(workers: list[Worker]) -> CheckLine:
    """What a restarted worker leaves behind: stale entries in the index, and whether another can go on for it."""
    faults = _none_seen(workers)
    for worker in workers:
        index = worker["index"]
        if index["num_believed"] is None:
            faults.append(f"the router does not say what {worker['worker']} holds")
        elif not index["is_equal"]:
            faults.append(
                f"{worker['worker']} holds {index['num_held']} blocks, the index believes in {index['num_believed']}"
                " or in others: something of an earlier life is left"
            )
    if len({worker["epoch"] for worker in workers}) < len(workers):
        faults.append("two workers live under one epoch")
    if len({worker["numerics"] for worker in workers}) > 1:
        faults.append("the workers' numerics differ: a stream cannot go on elsewhere when its worker is lost")
    alone = ", one worker: streams end with it" if len(workers) == 1 else ", streams can go on elsewhere"
    held = sum(worker["index"]["num_held"] for worker in workers)
    return line("restart", faults, f"the index agrees with {held} held blocks{alone}")


def _none_seen(workers: list[Worker]) -> list[str]:
    return [] if workers else ["no worker could be looked at"]


def _not_done(workers: list[Worker]) -> list[str]:
    return _none_seen(workers) + [
        f"{worker['worker']}: not compared, {worker['layout']['not_done']}"
        for worker in workers
        if worker["layout"]["not_done"]
    ]


def _comparisons(workers: list[Worker]) -> str:
    return "; ".join(_describe(worker) for worker in workers)


def _describe(worker: Worker) -> str:
    settings = worker["books"]["settings"]
    return f"{worker['layout']['num_comparisons']} comparisons in company equal those alone ({settings['layout']})"
