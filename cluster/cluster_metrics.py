"""The router's and the workers' numbers among the gateway's metrics, fresh at each scrape.

Labels are worker ids and counter names: bounded, and no one's identity.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.worker_health import is_quarantined
from router.stats import RouterStats, WorkerStats


class ClusterCollector(Collector):
    """Shows the last `stats` it was given; None: the router is gone."""

    def __init__(self) -> None:
        self.stats: RouterStats | None = None
        self.num_local_routes = 0

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        yield GaugeMetricFamily("watchword_router_up", "1 while the router answers", 0 if stats is None else 1)
        yield CounterMetricFamily(
            "watchword_local_routes", "Placements by this gateway alone, without a router", self.num_local_routes
        )
        if stats is None:
            return
        yield GaugeMetricFamily("watchword_reservations", "Places held for requests", stats.num_reservations)
        yield GaugeMetricFamily("watchword_queue_length", "Requests that wait for a worker", stats.num_queued)
        yield from self._router_counters(stats)
        yield from _worker_gauges(stats.workers)
        yield _worker_counters(stats.workers)
        yield _violations(stats.workers)

    def _router_counters(self, stats: RouterStats) -> Iterator[Metric]:
        family = CounterMetricFamily("watchword_router", "What the router counted", labels=["event"])
        for name in stats.counters.__slots__:
            family.add_metric([name.removeprefix("num_")], getattr(stats.counters, name))
        yield family


def _worker_gauges(workers: tuple[WorkerStats, ...]) -> Iterator[Metric]:
    shown = (
        ("watchword_worker_up", "1 while heartbeats come", lambda worker: int(worker.is_live)),
        ("watchword_worker_quarantined", "1 after an isolation violation", lambda worker: int(is_quarantined(worker))),
        ("watchword_worker_draining", "1 while it takes no new work", lambda worker: int(worker.is_draining)),
        ("watchword_requests_running", "Sequences in the engine's batch", lambda worker: _says(worker, "num_running")),
        ("watchword_requests_waiting", "Sequences not yet admitted", lambda worker: _says(worker, "num_waiting")),
        ("watchword_kv_blocks_free", "KV blocks free or evictable", lambda worker: _says(worker, "num_free_blocks")),
        ("watchword_decode_step_seconds", "Smoothed", lambda worker: _said(worker, "decode_step_s")),
        ("watchword_prefill_tokens_per_second", "Smoothed", lambda worker: _said(worker, "prefill_tokens_per_s")),
    )
    for name, text, read in shown:
        family = GaugeMetricFamily(name, text, labels=["worker"])
        for worker in workers:
            family.add_metric([worker.worker_id], read(worker))
        yield family


def _worker_counters(workers: tuple[WorkerStats, ...]) -> Metric:
    family = CounterMetricFamily("watchword_worker", "What an engine counted", labels=["worker", "event"])
    for worker in workers:
        for name, count in worker.snapshot.counters if worker.snapshot else ():
            family.add_metric([worker.worker_id, name], count)
    return family


def _violations(workers: tuple[WorkerStats, ...]) -> Metric:
    """What the structure check objected to, and damaged blocks."""
    family = CounterMetricFamily("watchword_isolation_violations", "Found by a worker's own checks", labels=["worker"])
    for worker in workers:
        counters = dict(worker.snapshot.counters) if worker.snapshot else {}
        count = counters.get("isolation_violations", 0) + counters.get("checksum_failures", 0)
        family.add_metric([worker.worker_id], count)
    return family


def _says(worker: WorkerStats, field: str) -> float:
    """What is so now: nothing runs on a worker that has fallen silent, whatever its last word was."""
    return _said(worker, field) if worker.is_heard else 0.0


def _said(worker: WorkerStats, field: str) -> float:
    return 0.0 if worker.snapshot is None else float(getattr(worker.snapshot, field))
