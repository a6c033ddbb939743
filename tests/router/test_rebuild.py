"""A router that starts anew knows again, within seconds, who lives and who holds what."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pytest
from index_harness import PATIENT
from router_builders import query, snapshot, worker_info

from cache_service.embedded import EmbeddedRedis
from cache_service.events import Snapshot
from cache_service.index_publisher import IndexPublisher
from cache_service.redis_index import IndexSettings
from cluster.api.ids import BlockKey, WorkerId
from cluster.api.secret import channel_token
from cluster.router_link import RouterLink
from router.actor import RouterActor
from router.config import RouterConfig
from router.settings import RouterSettings

NUM_WORKERS, BLOCKS_PER_WORKER = 4, 50_000
NAMESPACE = "rebuild"


@pytest.fixture
def redis_url() -> Iterator[str]:
    redis = EmbeddedRedis(supervise=False)
    redis.start()
    yield redis.url
    redis.stop()


def keys_of(worker: int) -> tuple[BlockKey, ...]:
    return tuple(
        BlockKey(blake2b(f"{worker}/{index}".encode(), digest_size=32).digest()) for index in range(BLOCKS_PER_WORKER)
    )


async def fill(url: str, contents: dict[WorkerId, tuple[BlockKey, ...]]) -> list[asyncio.Task[None]]:
    """The workers' publishers, which go on renewing their leases until they are cancelled."""
    tasks = []
    for worker_id, keys in contents.items():
        publisher = IndexPublisher(url, IndexSettings(NAMESPACE, lease_s=3600), worker_id, "e1", limits=PATIENT)
        publisher.publish_snapshot(Snapshot(worker_id, "e1", 1, keys))
        task = asyncio.create_task(publisher.run())
        async with asyncio.timeout(120):
            while not publisher.is_synced:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        tasks.append(task)
    return tasks


async def beat(actor: RouterActor, worker_id: WorkerId) -> None:
    """A worker's heart: it registers only when asked to."""
    while True:
        if (await actor.report(snapshot(worker_id)))["register"]:
            await actor.register(worker_info(worker_id, num_blocks=BLOCKS_PER_WORKER))
        await asyncio.sleep(0.5)


async def test_200_000_blocks_are_known_again_within_3_s(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.actor.yield_to_engines", lambda: None)  # the tests' own process keeps its place
    contents = {WorkerId(f"w{number}"): keys_of(number) for number in range(NUM_WORKERS)}
    publishing = await fill(redis_url, contents)
    url_file = tmp_path / "redis.url"
    url_file.write_text(redis_url)
    secret_file = tmp_path / "secret"
    secret_file.write_text("s" * 32)
    # However long the machine stands still, all workers are there: which one is asked first is not the question here.
    config = RouterConfig(heartbeat_ttl_s=600)
    settings = RouterSettings(config, redis_url_file=url_file, index_namespace=NAMESPACE, secret_file=secret_file)

    elapsed = [await rebuild(settings, contents) for _ in range(3)]  # the least: others use this machine too
    print(f"rebuilt in {min(elapsed):.2f} s")
    for task in publishing:
        task.cancel()
    await asyncio.wait(publishing)
    assert min(elapsed) < 3.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


async def rebuild(settings: RouterSettings, contents: dict[WorkerId, tuple[BlockKey, ...]]) -> float:
    """Seconds from the start to the first placement that knows everything."""
    started = time.monotonic()
    # What Ray does after a crash: the same arguments again.
    actor = RouterActor(settings)
    hearts = [asyncio.create_task(beat(actor, worker_id)) for worker_id in contents]
    async with asyncio.timeout(120):
        while (await actor.num_indexed_blocks()) < NUM_WORKERS * BLOCKS_PER_WORKER:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        link = RouterLink(await actor.channel(), channel_token(b"s" * 32))
        decision = await link.route(query("r", 64 * 16 + 1, block_keys=contents[WorkerId("w2")][:64]))
    elapsed = time.monotonic() - started
    await link.close()
    assert decision is not None
    assert (decision.worker_id, decision.num_matched_blocks) == ("w2", 64)
    indexed = await actor.indexed()
    assert {worker_id: len(prints) for worker_id, prints in indexed.items()} == dict.fromkeys(
        contents, BLOCKS_PER_WORKER
    )
    for heart in hearts:
        heart.cancel()
    await stop(actor)
    return elapsed


async def stop(actor: RouterActor) -> None:
    """What the end of its process does. A gRPC server that is merely forgotten blocks whoever collects the garbage."""
    assert actor._channel is not None
    await actor._channel.stop(0.0)
    assert actor._task is not None
    assert actor._follower is not None
    actor._task.cancel()
    await asyncio.wait({actor._task})
    await actor._follower.aclose()
