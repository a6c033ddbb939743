"""What the sentinel counts. Results are a fixed set; no label names a request or a user."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.sentinel.probe import ProbeReport, Result


class SentinelMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._runs = Counter(
            "watchword_contamination_probe_runs", "Marker probes by result", ["result"], registry=registry
        )
        for result in Result:
            self._runs.labels(result.value)  # a rate over a series that is not there yet would be empty
        self._leaks = Counter("watchword_contamination_leaks", "Probes that found a leak", registry=registry)
        self._tokens = Counter("watchword_contamination_probe_tokens", "Tokens that probes cost", registry=registry)
        self._seconds = Histogram(
            "watchword_contamination_probe_seconds",
            "Time of a probe",
            buckets=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0),
            registry=registry,
        )
        self._last = Gauge("watchword_contamination_probe_last_run_seconds", "Unix time of it", registry=registry)

    def note(self, report: ProbeReport, took_s: float, now_unix_s: float) -> None:
        self._runs.labels(report.result.value).inc()
        self._leaks.inc(report.result is Result.LEAK)
        self._tokens.inc(report.num_tokens)
        self._seconds.observe(took_s)
        self._last.set(now_unix_s)
