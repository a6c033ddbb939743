"""Numbers for Prometheus, in a registry of our own. Labels are bounded: models, routes and outcomes, never users."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.serving.text_delta import Usage

# The buckets that vLLM's dashboards expect, in seconds.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
E2E_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class HttpMetrics:
    """Answers by route template and status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Counter(
            "watchword_http_responses", "HTTP answers by route and status", ["route", "status"], registry=registry
        )

    def answered(self, route: str, status: int) -> None:
        self._answers.labels(route, str(status)).inc()


class GenerationMetrics:
    """A GenerationObserver: times as the gateway sees them, for both transports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        label = ["model_name"]
        self._running = Gauge("watchword_num_requests", "Requests not yet ended", label, registry=registry)
        self._ended = Counter(
            "watchword_requests", "Ended requests by outcome", ["model_name", "outcome"], registry=registry
        )
        self._prompt = Counter("watchword_prompt_tokens", "Prompt tokens", label, registry=registry)
        self._cached = Counter(
            "watchword_prompt_tokens_cached", "Prompt tokens taken from the prefix cache", label, registry=registry
        )
        self._completion = Counter("watchword_generation_tokens", "Output tokens", label, registry=registry)
        self._ttft = Histogram(
            "watchword_time_to_first_token_seconds",
            "Time to the first token",
            label,
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._itl = Histogram(
            "watchword_inter_token_latency_seconds",
            "Time between messages with tokens",
            label,
            buckets=ITL_BUCKETS,
            registry=registry,
        )
        self._e2e = Histogram(
            "watchword_e2e_request_latency_seconds",
            "Time from start to end of a request",
            label,
            buckets=E2E_BUCKETS,
            registry=registry,
        )

    def started(self, model: str) -> None:
        self._running.labels(model).inc()

    def first_token(self, model: str, after_s: float) -> None:
        self._ttft.labels(model).observe(after_s)

    def next_tokens(self, model: str, gap_s: float) -> None:
        self._itl.labels(model).observe(gap_s)

    def ended(self, model: str, outcome: str, after_s: float, usage: Usage) -> None:
        self._running.labels(model).dec()
        self._ended.labels(model, outcome).inc()
        self._e2e.labels(model).observe(after_s)
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._cached.labels(model).inc(usage.cached_tokens)
        self._completion.labels(model).inc(usage.completion_tokens)


class GatewayMetrics:
    """One registry and its parts. `registry` is open to others' collectors (router, workers)."""

    def __init__(self, refresh: Callable[[], Awaitable[None]] | None = None) -> None:
        self.registry = CollectorRegistry()
        self.http = HttpMetrics(self.registry)
        self.generation = GenerationMetrics(self.registry)
        self.refresh = refresh  # brings others' collectors up to date before a scrape

    async def scrape(self) -> bytes:
        """The text exposition format, all collectors up to date."""
        if self.refresh is not None:
            await self.refresh()
        return self.render()

    def render(self) -> bytes:
        return generate_latest(self.registry)
