"""One worker becomes two under load and one again after it, by Serve's autoscaler: `python tests/e2e/autoscale.py`.

Prints one JSON line. Serve collects the workers' figures every few seconds, so this takes a minute or two.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

from chaos_load import Load, Outcome, answer_alone, ends_of, faults_of, make_questions, wait_for
from observer import Observer
from ray import serve
from serve_application import serve_settings

from cluster.app import APP_NAME, build_app
from cluster.config import ClusterConfig

CONCURRENCY = 16
TIMEOUT_S = 240.0


async def run(url: str) -> dict[str, Any]:
    observer = Observer(url)
    await wait_for(lambda: observer.num_workers() == 1, 300, "a ready worker")
    questions = await answer_alone(url, "", make_questions(8))
    started = time.monotonic()
    outcomes: list[Outcome] = []

    async def keep_busy() -> None:
        while True:
            outcomes.extend(await Load(url, "").run(questions, 4 * CONCURRENCY, CONCURRENCY))

    busy = asyncio.create_task(keep_busy())
    await wait_for(lambda: observer.num_workers() == 2, TIMEOUT_S, "a second worker")
    up_s = time.monotonic() - started
    num_before = len(outcomes)
    while len(outcomes) < num_before + 8 * CONCURRENCY:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    busy.cancel()
    started = time.monotonic()
    await wait_for(lambda: observer.num_workers() == 1, TIMEOUT_S, "one worker again")
    return {
        "requests": len(outcomes),
        "ends": ends_of(outcomes),
        "second_worker_after_s": round(up_s, 1),
        "one_again_after_s": round(time.monotonic() - started, 1),
        "faults": faults_of(outcomes)[:5],
    }


def main() -> None:
    # Serve's own defaults are 10 s each.
    os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "2"
    with serve_settings("autoscale") as settings:
        config = ClusterConfig(**settings, workers=1, max_workers=2, upscale_delay_s=3, downscale_delay_s=5)
        serve.run(build_app(config), name=APP_NAME, route_prefix=None)
        print(json.dumps(asyncio.run(run(f"http://127.0.0.1:{config.http_port}"))), flush=True)


if __name__ == "__main__":
    main()
