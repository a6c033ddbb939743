"""LocalCluster: Ray, Redis and the application on one machine, owned by the process that started them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISDIR

import ray
from ray import serve
from rich.markup import escape

from cache_service.embedded import EmbeddedRedis
from cluster.api.errors import InvalidRequestError
from cluster.api.precedence import yield_at_start
from cluster.api.secret import load_or_create_secret
from cluster.auth.access import access_at
from cluster.config import ClusterConfig

APP_NAME = "watchword"
# Ray keeps what it needs for a few hundred small messages; tokens do not pass through its object store.
OBJECT_STORE_BYTES = 128 << 20
# Ray's own watching took a quarter of a core beside an idle server, and each wake-up delays a step that uses all cores.
# On one machine without a dashboard nobody reads most of it, and the rest need not be a tenth of a second old.
QUIET_RAY = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",  # off
    "RAY_enable_metrics_collection": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "METRICS_RECORD_INTERVAL_S": "60",
    "AUTOSCALER_UPDATE_INTERVAL_S": "60",
    # Ray would copy its workers' logs to this terminal; with `log_to_driver` off it still looks for them.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "60",
    "RAY_LOG_MONITOR_MAX_OPEN_FILES": "0",
}


class LocalCluster:
    """`start`, `wait_ready`, `stop`. Everything it starts dies with it, also when it is killed."""

    def __init__(self, config: ClusterConfig, report: Callable[[str], None]) -> None:
        self._report = report
        self._redis: EmbeddedRedis | None = None
        self.access = access_at(config.host, config.keys_path, is_loopback=config.is_loopback)
        self._run_dir = Path(tempfile.mkdtemp(prefix="watchword-"))
        self.config = config.model_copy(
            update={
                "http_port": config.http_port or _free_port(config.host),
                "grpc_port": config.grpc_port or _free_port(config.host),
            }
        )
        self.model_name = ""
        self._deploy_error: str | None = None

    @property
    def http_address(self) -> str:
        return f"{self.config.host}:{self.config.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{self.config.host}:{self.config.grpc_port}"

    def start(self) -> None:
        """Returns when the application is deployed; its workers may still be loading (see wait_ready)."""
        os.umask(0o077)  # what Ray writes (its token, its logs) is for this user alone
        self._check_bind()
        from cluster.app import build_app, model_name

        self.model_name = model_name(self.config)  # before anything runs: it may be wrong
        load_or_create_secret(self.config.secret_path)
        yield_at_start()
        config = self.config.model_copy(update={"redis_url": None, "redis_url_file": self._redis_url_file()})
        self._report("starting Ray")
        _start_ray(config)
        self._report(f"loading {self.model_name} into {config.workers} worker(s)")
        serve.start(proxy_location="Disabled")
        # In a thread: deploying returns when every worker has loaded, and progress is shown meanwhile.
        self._deployment = threading.Thread(target=self._deploy, args=(build_app(config),), daemon=True)
        self._deployment.start()

    def wait_ready(self, timeout_s: float, stop: threading.Event) -> bool:
        """True once /ready answers for all workers; False when `stop` was set first. Raises when deploying fails."""
        deadline = time.monotonic() + timeout_s
        num_ready = -1
        while not stop.is_set():
            if self._deploy_error is not None:
                raise InvalidRequestError(f"the application could not start: {self._deploy_error}")
            ready = self._count_ready_workers()
            if ready != num_ready and ready >= 0:
                num_ready = ready
                self._report(f"workers ready: {ready} of {self.config.workers}")
            if ready >= self.config.workers:
                return True
            if time.monotonic() > deadline:
                raise InvalidRequestError(f"not ready after {timeout_s:.0f} s")
            stop.wait(0.2)
        return False

    def stop(self) -> None:
        """Drains and ends everything. A KeyboardInterrupt cuts the draining short, never the ending."""
        try:
            if ray.is_initialized():
                with _ray_kept_quiet():
                    serve.shutdown()
        except KeyboardInterrupt:
            self._report("cutting running requests short")
        finally:
            with _ray_kept_quiet():
                ray.shutdown()
            if self._redis is not None:
                self._redis.stop()
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _deploy(self, app: serve.Application) -> None:
        try:
            serve.run(app, name=APP_NAME, route_prefix=None)
        except Exception as error:  # told to whoever waits for readiness
            self._deploy_error = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__

    def _check_bind(self) -> None:
        for port in (self.config.http_port, self.config.grpc_port):
            _require_free(self.config.host, port)
        if self.access.warning is not None:
            self._report(f"[yellow]{escape(self.access.warning)}[/yellow]")

    def _redis_url_file(self) -> Path:
        if self.config.redis_url_file is not None:
            return self.config.redis_url_file
        url = self.config.redis_url
        if url is None:
            self._report("starting the embedded prefix index (Valkey)")
            self._redis = EmbeddedRedis(supervise=True)
            self._redis.start()
            url = self._redis.url
        path = self._run_dir / "redis.url"
        path.touch(mode=0o600)
        path.write_text(url, encoding="utf-8")
        return path

    def _count_ready_workers(self) -> int:
        """-1 while the gateway does not answer."""
        url = f"{'https' if self.config.tls_cert_file else 'http'}://{self.http_address}/ready"
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                return int(response.headers.get("x-watchword-workers", "0"))
        except urllib.error.HTTPError as error:
            return int(error.headers.get("x-watchword-workers", "0"))
        except (OSError, ValueError):
            return -1


def _start_ray(config: ClusterConfig) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        # Ray's own ports listen on every interface and mean code execution: never without its token.
        raise InvalidRequestError(f"RAY_AUTH_MODE is {os.environ['RAY_AUTH_MODE']!r}, only 'token' is safe: unset it")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray would run workers at niceness 15: behind everything else on the machine, the gateway included.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for name, value in QUIET_RAY.items():
        os.environ.setdefault(name, value)
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ray.init(
        address="local",  # never another cluster that happens to run on this machine
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        # Logical CPUs: placement on one machine is not what limits it, threads are (config.threads).
        num_cpus=max(os.cpu_count() or 1, config.most_workers + config.gateways + 2),
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(_private_folder() / "ray"),
    )


@contextlib.contextmanager
def _ray_kept_quiet() -> Iterator[None]:
    """Ray tells the terminal that its own controller, which it is just ending, has ended, and is tried again."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _private_folder() -> Path:
    """Around Ray's folder of sockets and logs, which Ray opens to everyone for writing."""
    folder = Path(tempfile.gettempdir()) / f"watchword-ray-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.lstat()
    if not S_ISDIR(stat.st_mode) or stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise InvalidRequestError(f"{folder} must be a folder that only this user can enter: remove it and start again")
    return folder


def _require_free(host: str, port: int) -> None:
    """Gateways share their ports (SO_REUSEPORT): without this, two servers would silently share callers too."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidRequestError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
