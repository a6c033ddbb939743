"""A changed Serve configuration reaches the router that is there already: `python tests/e2e/redeploy.py`.

Deploys, asks, deploys again with a limit of requests per minute, and asks until the limit shows. Prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from chaos_load import Load, answer_alone, ends_of, make_questions, wait_for
from observer import Observer
from serve_application import deploy, serve_settings

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
    with serve_settings("redeploy") as settings:
        settings["workers"] = 1
        deploy(settings, 1)
        print(json.dumps(asyncio.run(run(settings))), flush=True)


if __name__ == "__main__":
    main()
