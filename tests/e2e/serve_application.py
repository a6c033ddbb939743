"""Ray, Serve and Valkey of their own for a script that deploys an application through Serve's configuration."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from e2e_server import free_port
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from cache_service.embedded import EmbeddedRedis
from cluster.api.secret import load_or_create_secret


def deploy(settings: dict[str, Any], num_workers: int, options: dict[str, dict[str, Any]] | None = None) -> None:
    """As a changed Serve configuration file does it. `options`: by deployment, what else the file says of it."""
    deployments = {"Worker": {"num_replicas": num_workers}}
    for name, said in (options or {}).items():
        deployments[name] = deployments.get(name, {}) | said
    application = {
        "name": "watchword",
        "import_path": "cluster.app:build",
        "route_prefix": None,
        "args": settings,
        "deployments": [{"name": name, **said} for name, said in deployments.items()],
    }
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


@contextmanager
def serve_settings(name: str) -> Iterator[dict[str, Any]]:
    """Yields the application's settings but for the number of workers; ends all that it started."""
    state_dir = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    redis = EmbeddedRedis(supervise=True)
    redis.start()
    url_file = state_dir / "redis.url"
    url_file.write_text(redis.url)
    load_or_create_secret(state_dir / "cluster.api.secret")
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=128 << 20,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    try:
        serve.start(proxy_location="Disabled")
        yield {
            "http_port": free_port(),
            "grpc_port": free_port(),
            "threads": 1,
            "kv_memory_gib": 0.25,
            "state_dir": str(state_dir),
            "redis_url_file": str(url_file),
        }
    finally:
        serve.shutdown()
        ray.shutdown()
        redis.stop()
