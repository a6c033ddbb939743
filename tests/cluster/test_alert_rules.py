"""The alert rules name metrics that exist, under the labels that they carry."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from cluster.cluster_metrics import ClusterCollector
from cluster.metrics import GatewayMetrics
from cluster.sentinel.metrics import SentinelMetrics
from router.stats import Counters, RouterStats, WorkerStats

RULES = Path(__file__).parents[2] / "k8s" / "monitoring" / "watchword-alerts.yaml"


def metrics_text() -> str:
    metrics, collector = GatewayMetrics(), ClusterCollector()
    SentinelMetrics(metrics.registry)
    worker = WorkerStats("worker-0", "e1", True, False, False, 0, 0, 0.0, 0.0, 0.0)  # type: ignore[arg-type]
    collector.stats = RouterStats(Counters(), 0, 0, (worker,))
    metrics.registry.register(collector)
    return metrics.render().decode()


def rules() -> list[dict[str, object]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_every_metric_of_the_rules_is_scraped() -> None:
    text = metrics_text()
    names = {name for rule in rules() for name in re.findall(r"watchword_[a-z_]+", str(rule["expr"]))}
    assert len(names) == 5
    for name in names:
        assert re.search(rf"^{name}[{{ ]", text, flags=re.MULTILINE), name


def test_the_labels_of_the_rules_are_there() -> None:
    text = metrics_text()
    assert 'watchword_isolation_violations_total{worker="worker-0"}' in text
    assert 'watchword_worker_quarantined{worker="worker-0"}' in text
    for result in ("failed", "void"):
        assert f'watchword_contamination_probe_runs_total{{result="{result}"}}' in text


def test_every_rule_says_what_happened() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")  # type: ignore[index]
        assert {"summary", "description"} <= rule["annotations"].keys()  # type: ignore[union-attr]


def test_the_pages_that_the_rules_name_are_there() -> None:
    pages = re.findall(r"docs/\S+\.md", RULES.read_text())
    assert pages
    assert all((RULES.parents[2] / page).is_file() for page in pages), pages
