"""A changed Serve configuration reaches the router that is there already: `python tests/e2e/redeploy.py`.

Deploys, asks, deploys again with a limit of requests per minute, and asks until the limit shows. Prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from chaos_load import Load, answer_alone, ends_of, make_questions, wait_for
from e2e_server import free_port
from ray import serve
from scale_down import deploy
from three_nodes import Observer

from cache_service.embedded import EmbeddedRedis
from cluster.api.secret import load_or_create_secret

LIMIT_PER_MIN = 5


async def run(settings: dict[str, Any]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{settings['http_port']}"
    observer = Observer(url)
    await wait_for(lambda: observer.num_workers() == 1, 300, "a ready worker")
    questions = await answer_alone(url, "", make_questions(8))
    before = ends_of(await Load(url, "").run(questions, 2 * LIMIT_PER_MIN, 2))
    started = time.monotonic()
    await asyncio.to_thread(deploy, settings | {"tenant_requests_per_min": LIMIT_PER_MIN}, 1)
    deadline = started + 240
    after: dict[str, int] = {}
    while "error:rate_limit_exceeded" not in after and time.monotonic() < deadline:
        after = ends_of(await Load(url, "").run(questions, 2 * LIMIT_PER_MIN, 2))
    return {"before": before, "after": after, "in_effect_after_s": round(time.monotonic() - started, 1)}


def main() -> None:
    state_dir = Path(tempfile.mkdtemp(prefix="redeploy-"))
    redis = EmbeddedRedis(supervise=True)
    redis.start()
    url_file = state_dir / "redis.url"
    url_file.write_text(redis.url)
    settings = {
        "http_port": free_port(),
        "grpc_port": free_port(),
        "workers": 1,
        "threads": 1,
        "kv_memory_gib": 0.25,
        "state_dir": str(state_dir),
        "redis_url_file": str(url_file),
    }
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
        deploy(settings, 1)
        print(json.dumps(asyncio.run(run(settings))), flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
        redis.stop()


if __name__ == "__main__":
    main()
