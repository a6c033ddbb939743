"""Two workers become one through Serve's configuration while requests run: `python tests/e2e/scale_down.py`.

The leaving replica takes no new work; its streams end there or, when its time is up, go on elsewhere. Prints one JSON
line.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from chaos_load import Load, answer_alone, ends_of, faults_of, make_questions, reach, wait_for
from observer import Observer
from serve_application import deploy, serve_settings

NUM_REQUESTS, CONCURRENCY = 120, 12


async def run(settings: dict[str, Any]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{settings['http_port']}"
    observer = Observer(url)
    await wait_for(lambda: observer.num_workers() == 2, 300, "two ready workers")
    questions = await answer_alone(url, "", make_questions(8))
    load = Load(url, "")
    running = asyncio.create_task(load.run(questions, NUM_REQUESTS, CONCURRENCY))
    await reach(load, 0.0, 8)
    num_streaming = len(load.streaming)
    started = time.monotonic()
    await asyncio.to_thread(deploy, settings, 1)
    await wait_for(lambda: observer.num_workers() == 1, 60, "a worker that takes no new work")
    drained_s = time.monotonic() - started
    outcomes = await running
    await wait_for(lambda: observer.metrics().sum("watchword_reservations") == 0, 30, "the return of all places")
    return {
        "requests": len(outcomes),
        "ends": ends_of(outcomes),
        "streaming_when_told": num_streaming,
        "out_of_service_after_s": round(drained_s, 1),
        "moved": observer.num_retries(),
        "faults": faults_of(outcomes)[:5],
    }


def main() -> None:
    with serve_settings("scale-down") as settings:
        settings["workers"] = 2
        deploy(settings, 2)
        print(json.dumps(asyncio.run(run(settings))), flush=True)


if __name__ == "__main__":
    main()
