"""A running server seen from outside: its metrics, its ready workers, and what it still holds when nobody asks."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterable

import psutil

WORKER, GATEWAY, ROUTER = "ServeReplica:watchword:Worker", "ServeReplica:watchword:Gateway", "RouterActor"


class Metrics:
    """One scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self._lines = [line for line in text.splitlines() if line and not line.startswith("#")]

    def values(self, name: str) -> dict[str, float]:
        """Label text -> value."""
        found = {}
        for line in self._lines:
            if line.startswith((name + " ", name + "{")):
                labels, _, value = line[len(name) :].rpartition(" ")
                found[labels] = float(value)
        return found

    def sum(self, name: str) -> float:
        values = self.values(name)
        assert values, f"{name} is not among the metrics"
        return sum(values.values())

    def router(self, event: str) -> float:
        return self.values("watchword_router_total").get(f'{{event="{event}"}}', 0.0)

    def what_is_left(self, free_blocks: float) -> list[str]:
        """Names what is still held; `free_blocks` are those of an idle worker."""
        left = []
        for name in ("reservations", "queue_length", "requests_running", "requests_waiting"):
            if (value := sum(self.values(f"watchword_{name}").values())) != 0:
                left.append(f"{value:.0f} {name}")
        up = {labels for labels, value in self.values("watchword_worker_up").items() if value}
        for labels, free in self.values("watchword_kv_blocks_free").items():
            if labels in up and free != free_blocks:
                left.append(f"{free_blocks - free:.0f} blocks on {labels}")
        if self.values("watchword_router_up") != {"": 1.0}:
            left.append("no router")
        return left


class Observer:
    """`key`: an operator's, where the server asks for one."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def num_workers(self) -> int:
        """That take work; 0 also while nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=20) as response:
                return int(response.headers["x-watchword-workers"])
        except urllib.error.HTTPError as error:
            return int(error.headers.get("x-watchword-workers") or 0)
        except OSError:
            return 0

    def metrics(self) -> Metrics:
        request = urllib.request.Request(f"{self.url}/metrics", headers=self._headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return Metrics(response.read().decode())

    def num_retries(self) -> float:
        """Requests that the router placed anew because their worker was lost."""
        return self.metrics().router("retries")


def num_client_connections(gateways: Iterable[psutil.Process], ports: tuple[int, ...]) -> int:
    """Established ones to the ports on which callers are served."""
    found = 0
    for gateway in gateways:
        try:
            connections = gateway.net_connections("tcp")
        except psutil.Error:
            continue
        found += sum(c.status == psutil.CONN_ESTABLISHED and c.laddr.port in ports for c in connections)
    return found
