"""Three Ray nodes, of which one is killed and one falls silent while requests run: `python tests/e2e/three_nodes.py`.

Prints one JSON line. Nodes are Ray's own multi-node test cluster: raylets of their own on one machine. The silent node
is stopped (SIGSTOP), so that its connections stay open and nothing on it answers, as behind a cut network.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import psutil
import ray
from chaos_load import PATIENCE_S, Load, Question, answer_alone, ends_of, faults_of, make_questions, reach, wait_for
from e2e_server import free_port
from observer import GATEWAY, WORKER, Observer
from ray import serve
from ray.cluster_utils import Cluster

from cache_service.embedded import EmbeddedRedis
from cluster.api.secret import load_or_create_secret
from cluster.app import APP_NAME, build_app
from cluster.config import ClusterConfig

NUM_WORKERS, NUM_REQUESTS, CONCURRENCY = 3, 120, 16
SILENCE_S = 14.0  # the streams to a silent worker end after 10 s


class Nodes:
    """A head and two more. A worker needs a whole CPU, so the two have room for one each."""

    def __init__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 128 << 20})
        self.others = [self.cluster.add_node(num_cpus=1, object_store_memory=128 << 20) for _ in range(2)]

    def victims(self) -> list[Any]:
        """Nodes besides the head with a worker and without a gateway."""
        return [node for node in self.others if self.has(node, WORKER) and not self.has(node, GATEWAY)]

    def has(self, node: Any, title: str) -> bool:
        return any(title in " ".join(process.cmdline()) for process in self.processes(node))

    def processes(self, node: Any) -> list[psutil.Process]:
        (raylet,) = node.all_processes["raylet"]
        parent = psutil.Process(raylet.process.pid)
        return [parent, *parent.children(recursive=True)]


async def run(nodes: Nodes, url: str, questions: list[Question]) -> dict[str, Any]:
    observer = Observer(url)
    load = Load(url, "")
    running = asyncio.create_task(load.run(questions, NUM_REQUESTS, CONCURRENCY))
    kill, cut = nodes.victims()[:2]
    await reach(load, 0.2, 6)
    retries = observer.num_retries()
    for process in nodes.processes(kill):  # a node that dies takes everything with it, not its raylet alone
        process.kill()
    nodes.cluster.remove_node(kill, allow_graceful=False)
    await wait_for(lambda: observer.num_retries() > retries or running.done(), PATIENCE_S, "a request placed anew")
    await asyncio.sleep(4)
    hit_by_kill = await asyncio.to_thread(observer.num_retries) - retries
    await reach(load, 0.5, 6)
    stopped = nodes.processes(cut)
    for process in stopped:
        process.suspend()
    await asyncio.sleep(SILENCE_S)
    await wait_for(
        lambda: observer.num_retries() - retries > hit_by_kill or running.done(), PATIENCE_S, "another one placed anew"
    )
    hit_by_cut = observer.num_retries() - retries - hit_by_kill
    for process in stopped:
        os.kill(process.pid, signal.SIGCONT)
    outcomes = await running
    await wait_for(lambda: observer.metrics().sum("watchword_reservations") == 0, 30, "the return of all places")
    return {
        "requests": len(outcomes),
        "ends": ends_of(outcomes),
        "hit_by_kill": hit_by_kill,
        "hit_by_cut": hit_by_cut,
        "faults": faults_of(outcomes)[:5],
        "workers_left": observer.num_workers(),
    }


async def serve_and_run(nodes: Nodes, config: ClusterConfig) -> dict[str, Any]:
    url = f"http://127.0.0.1:{config.http_port}"
    await wait_for(lambda: Observer(url).num_workers() == NUM_WORKERS, 300, "three ready workers")
    questions = await answer_alone(url, "", make_questions(12))
    return await run(nodes, url, questions)


def main() -> None:
    state_dir = Path(tempfile.mkdtemp(prefix="three-nodes-"))
    redis = EmbeddedRedis(supervise=True)
    redis.start()
    url_file = state_dir / "redis.url"
    url_file.write_text(redis.url)
    nodes = Nodes()
    ray.init(address=nodes.cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    config = ClusterConfig(
        http_port=free_port(),
        grpc_port=free_port(),
        worker_host="node",
        workers=NUM_WORKERS,
        threads=1,
        kv_memory_gib=0.25,
        state_dir=state_dir,
        redis_url_file=url_file,
    )
    load_or_create_secret(config.secret_path)
    try:
        serve.start(proxy_location="Disabled")
        serve.run(build_app(config), name=APP_NAME, route_prefix=None)
        print(json.dumps(asyncio.run(serve_and_run(nodes, config))), flush=True)
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()
        redis.stop()


if __name__ == "__main__":
    main()
