"""Chaos under load, 500 requests and more a scenario: `make chaos`. What is done is in chaos_scenarios.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import chaos_scenarios as scenarios
import pytest
from chaos_load import answer_alone, make_questions
from chaos_rig import ChaosRig, ProxyThread
from conftest import make_key
from e2e_server import Server
from tcp_proxy import TcpProxy

from cache_service.embedded import EmbeddedRedis

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(1800)]

NUM_REQUESTS = 500
NUM_QUESTIONS = 32


@dataclass
class Arena:
    server: Server
    operator: str
    delegate: str
    redis: EmbeddedRedis
    proxy: TcpProxy
    rig: ChaosRig | None = None


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """Two workers, two gateways on one port, and a Redis behind a proxy that can delay it."""
    state_dir = tmp_path_factory.mktemp("chaos")
    operator = make_key(state_dir, "--tenant", "acme", "--operator")
    delegate = make_key(state_dir, "--tenant", "acme", "--delegate")
    redis = EmbeddedRedis(supervise=True)
    redis.start()
    thread = ProxyThread(redis.port)
    with thread.running() as proxy:
        url = redis.url.replace(f":{redis.port}/", f":{proxy.port}/")
        args = ("--workers=2", "--kv-memory-gib=0.5", "--set", "gateways=2")
        server = Server(state_dir, *args, env={"WATCHWORD_REDIS_URL": url})
        try:
            server.wait_ready(workers=2)
            arena = Arena(server, operator, delegate, redis, proxy)
            yield arena
            print("\n" + "\n".join(arena.rig.report if arena.rig else []))
        finally:
            server.stop()
            redis.stop()


@pytest.fixture
async def rig(arena: Arena) -> ChaosRig:
    if arena.rig is None:
        questions = await answer_alone(arena.server.url, arena.delegate, make_questions(NUM_QUESTIONS))
        arena.rig = ChaosRig(arena.server, arena.operator, arena.delegate, questions)
        await arena.rig.measure_idle()
    return arena.rig


async def test_a_worker_is_killed(rig: ChaosRig) -> None:
    await scenarios.kill_worker(rig, NUM_REQUESTS)


async def test_the_router_is_killed(rig: ChaosRig) -> None:
    await scenarios.kill_router(rig, NUM_REQUESTS)


async def test_the_router_hangs(rig: ChaosRig) -> None:
    await scenarios.hang_router(rig, NUM_REQUESTS)


async def test_redis_is_killed(rig: ChaosRig, arena: Arena) -> None:
    await scenarios.kill_redis(rig, NUM_REQUESTS, lambda: _pid(arena.redis))


def _pid(redis: EmbeddedRedis) -> int:
    assert redis.pid is not None
    return redis.pid


async def test_a_gateway_is_killed(rig: ChaosRig) -> None:
    await scenarios.kill_gateway(rig, NUM_REQUESTS)


@pytest.mark.parametrize("delay_s", [0.1, 5.0])
async def test_redis_is_far_away(rig: ChaosRig, arena: Arena, delay_s: float) -> None:
    await scenarios.slow_redis(rig, NUM_REQUESTS, arena.proxy, delay_s)


async def test_clients_leave(rig: ChaosRig) -> None:
    await scenarios.disconnects(rig, NUM_REQUESTS)


async def test_clients_do_not_read(rig: ChaosRig) -> None:
    await scenarios.slow_readers(rig, NUM_REQUESTS)


async def test_the_queue_is_full(rig: ChaosRig) -> None:
    await scenarios.full_queue(rig, NUM_REQUESTS)


async def test_request_ids_are_reused(rig: ChaosRig) -> None:
    await scenarios.id_reuse(rig, NUM_REQUESTS)
