"""A cluster over several machines (namespaces.py), put up as an operator would: Redis, a Ray head with the gateway on
it, and a Ray node per engine."""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import ray
from namespaces import Lan
from ray import serve
from ray._raylet import AuthenticationTokenLoader, Config
from serve_application import deploy

from cache_service.embedded import find_server
from cluster.api.secret import load_or_create_secret

HEAD = "head"
PORTS = HTTP_PORT, GRPC_PORT = 8000, 9000
REDIS_PORT, RAY_PORT = 6380, 6379
URL = f"http://127.0.0.1:{HTTP_PORT}"
# Ray's own are 3 s, 10 s and 5: a node that is cut off counts as dead after about a minute. Here after 40 s.
HEALTH_CHECKS = {"period_ms": 2_000, "timeout_ms": 3_000, "failure_threshold": 8}
HEAD_ONLY = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false")
OBJECT_STORE_BYTES = 128 << 20


class Machines:
    """`lan` has a machine called head, where this process runs, and one for each engine."""

    def __init__(self, lan: Lan, state_dir: Path) -> None:
        self.lan = lan
        self.state_dir = state_dir
        self.engines = [name for name in lan.addresses if name != HEAD]
        self.secret = load_or_create_secret(state_dir / "cluster.secret")
        self._redis_password = secrets.token_urlsafe(32)
        self._log = (state_dir / "machines.log").open("wb")
        self._set_environment()

    def start(self) -> None:
        """Returns when everything has been asked for; engines load for some seconds more."""
        self._start_redis()
        self._start_ray(HEAD, *HEAD_ONLY, role="gateway")
        for engine in self.engines:
            self.start_engine(engine)
        self._join()
        serve.start(proxy_location="Disabled")
        threads = {"env_vars": {"OMP_NUM_THREADS": "1"}}
        options = {
            "Gateway": {"ray_actor_options": {"num_cpus": 0.5, "resources": {"gateway": 0.001}}},
            "Worker": {"ray_actor_options": {"num_cpus": 1, "resources": {"engine": 1}, "runtime_env": threads}},
        }
        deploy(self._settings(), len(self.engines), options)

    def start_engine(self, machine: str) -> None:
        """A Ray node that joins the head's cluster and has room for one engine."""
        self._start_ray(machine, f"--address={self.lan.addresses[HEAD]}:{RAY_PORT}", role="engine")

    def stop(self) -> None:
        """What still runs on the machines ends with them."""
        ray.shutdown()
        self._log.close()

    def processes(self, machine: str, fragment: str) -> list[psutil.Process]:
        found = []
        for pid in self.lan.pids(machine):
            try:
                process = psutil.Process(pid)
                if fragment in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def is_alive_to_ray(self, machine: str) -> bool:
        return any(n["Alive"] and n["NodeManagerAddress"] == self.lan.addresses[machine] for n in ray.nodes())

    def _settings(self) -> dict[str, Any]:
        url_file = self.state_dir / "redis.url"
        url_file.touch(mode=0o600)
        url_file.write_text(f"redis://:{self._redis_password}@{self.lan.addresses[HEAD]}:{REDIS_PORT}/0")
        return {
            "http_port": HTTP_PORT,
            "grpc_port": GRPC_PORT,
            "worker_host": "node",
            "workers": len(self.engines),
            "threads": 1,
            "kv_memory_gib": 0.25,
            "secret_file": str(self.state_dir / "cluster.secret"),
            "redis_url_file": str(url_file),
            "state_dir": str(self.state_dir),
            "debug_headers": True,
        }

    def _set_environment(self) -> None:
        token = self.state_dir / "ray.token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ |= {"RAY_worker_niceness": "0"}
        os.environ |= {f"RAY_health_check_{name}": str(value) for name, value in HEALTH_CHECKS.items()}
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        Config.initialize("")  # Ray has read its environment when it was imported
        AuthenticationTokenLoader.instance().reset_cache()

    def _start_redis(self) -> None:
        config = [
            f"bind 127.0.0.1 {self.lan.addresses[HEAD]}",
            f"port {REDIS_PORT}",
            f"requirepass {self._redis_password}",
            'save ""',
            "maxmemory 256mb",
            "maxmemory-policy allkeys-lru",
        ]
        command = [str(find_server()), "-"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log)
        assert process.stdin is not None
        process.stdin.write(("\n".join(config) + "\n").encode())
        process.stdin.close()

    def _start_ray(self, machine: str, *args: str, role: str) -> None:
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            f"--node-ip-address={self.lan.addresses[machine]}",
            "--num-cpus=1",
            f"--resources={json.dumps({role: 1})}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--temp-dir={self.state_dir / machine}",  # a disk of its own: nodes on one would share names of sockets
            *args,
        ]
        subprocess.Popen(self.lan.on(machine, *command), stdout=self._log, stderr=self._log, start_new_session=True)

    def _join(self) -> None:
        for _ in range(60):
            try:
                ray.init(
                    address=f"{self.lan.addresses[HEAD]}:{RAY_PORT}",
                    _node_ip_address=self.lan.addresses[HEAD],
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                )
            except (ConnectionError, RuntimeError):
                continue
            return
        raise TimeoutError("no Ray head to join")
