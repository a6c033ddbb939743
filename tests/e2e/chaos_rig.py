"""A real cluster to be harmed: what to kill, what must be left afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos_load import PATIENCE_S, Load, Outcome, Question, ends_of, faults_of, wait_for
from e2e_server import Server
from observer import GATEWAY, Metrics, Observer, num_client_connections
from tcp_proxy import TcpProxy

AUDIT = Path(__file__).with_name("audit_index.py")


@dataclass
class ChaosRig:
    server: Server
    operator: str
    delegate: str
    questions: list[Question]
    num_workers: int = 2
    free_blocks: float = 0.0  # of one idle worker
    report: list[str] = field(default_factory=list)

    def metrics(self) -> Metrics:
        return Observer(self.server.url, self.operator).metrics()

    def processes(self, fragment: str) -> list[psutil.Process]:
        return self.server.find(fragment)

    async def measure_idle(self) -> None:
        """Learns what an idle worker has free. Not at once: a worker's word is up to half a second old."""
        await wait_for(lambda: not self.metrics().sum("watchword_requests_running"), PATIENCE_S, "idle workers")
        self.free_blocks = max(self.metrics().values("watchword_kv_blocks_free").values())

    def is_whole(self) -> bool:
        """All processes are there and all workers take work."""
        try:
            metrics = self.metrics()
        except OSError:
            return False
        return metrics.values("watchword_router_up") == {"": 1.0} and self.server.num_workers() == self.num_workers

    def what_is_left(self) -> str:
        """Names what is still held although nobody asks for anything; empty when it is nothing."""
        try:
            metrics = self.metrics()
        except OSError as error:
            return f"no metrics: {error}"
        left = metrics.what_is_left(self.free_blocks)
        ports = (self.server.http_port, self.server.grpc_port)
        num_clients = num_client_connections(self.processes(GATEWAY), ports)
        if num_clients > 1:  # this scrape's own may be seen
            left.append(f"{num_clients} client connections")
        return ", ".join(left)

    async def check_aftermath(self) -> None:
        """Nothing is left behind and the index says what the workers hold."""
        await wait_for(self.is_whole, PATIENCE_S, "the cluster being whole again")
        try:
            await wait_for(lambda: not self.what_is_left(), PATIENCE_S / 2, "an empty cluster")
        except AssertionError:
            raise AssertionError(f"left behind: {self.what_is_left()}") from None
        audit = await asyncio.to_thread(self.audit)
        assert audit["differing"] == [], audit

    def audit(self) -> dict[str, list[str]]:
        """Compares the router's index with the workers' caches (audit_index.py, a Ray driver of its own)."""
        raylet = self.server.find("raylet/raylet")[0]
        address = next(a.partition("=")[2] for a in raylet.cmdline() if a.startswith("--gcs-address="))
        environ = {**os.environ, **{name: value for name, value in raylet.environ().items() if name.startswith("RAY_")}}
        command = [sys.executable, str(AUDIT), address, str(self.server.state_dir)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environ)
        assert result.returncode == 0, result.stderr[-3000:]
        answer: dict[str, list[str]] = json.loads(result.stdout.strip().splitlines()[-1])
        return answer

    def load(self) -> Load:
        return Load(self.server.url, self.delegate)

    def judge(self, scenario: str, outcomes: list[Outcome], num_hits: float, detail: str = "") -> None:
        """Fails for any wrong answer, and when nothing was hit."""
        faults = faults_of(outcomes)
        line = f"{scenario}: {len(outcomes)} requests, {num_hits:.0f} hit, ends {ends_of(outcomes)} {detail}"
        self.report.append(line)
        print(line, flush=True)
        assert not faults, "\n".join(faults[:10])
        assert num_hits > 0, f"void: {line}"


class ProxyThread:
    """A TcpProxy on an event loop of its own, so that a stalled test does not stall it."""

    def __init__(self, target_port: int) -> None:
        self.proxy = TcpProxy(target_port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @contextmanager
    def running(self) -> Iterator[TcpProxy]:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.proxy.__aenter__(), self._loop).result(PATIENCE_S)
        try:
            yield self.proxy
        finally:
            asyncio.run_coroutine_threadsafe(self.proxy.__aexit__(), self._loop).result(PATIENCE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
