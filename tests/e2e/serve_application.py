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

from cache_service.embedded import EmbeddedRedis
from cluster.api.secret import load_or_create_secret


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
