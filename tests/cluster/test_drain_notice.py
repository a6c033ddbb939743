"""A gateway says that it goes while it still answers, so that balancers send callers elsewhere first."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import uvicorn
from front_door import FakeBackend, build_core, chat_body, client_of
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.api.drain_notice import DrainNotice
from cluster.auth.authenticator import Authenticator
from cluster.drain import main as drain
from cluster.gateway import announce_leave
from cluster.grpc_server import GrpcServerConfig, build_grpc_server
from cluster.grpc_service import SERVICE_NAME
from cluster.http.config import HttpConfig
from cluster.http_app import build_http_app
from cluster.metrics import GatewayMetrics

OPEN_TO_ALL = Authenticator(None, allow_anonymous=True)


def door(notice: DrainNotice) -> Any:
    core, metrics = build_core(FakeBackend()), GatewayMetrics()
    return build_http_app(core, OPEN_TO_ALL, metrics, HttpConfig(), is_draining=lambda: notice.is_given)


async def statuses(client: httpx.AsyncClient) -> list[int]:
    answers = [await client.get(path) for path in ("/ready", "/-/healthz", "/health")]
    answers.append(await client.post("/v1/chat/completions", json=chat_body()))
    return [answer.status_code for answer in answers]


async def test_readiness_fails_while_requests_are_still_answered() -> None:
    notice = DrainNotice()
    async with client_of(door(notice)) as client:
        assert await statuses(client) == [200, 200, 200, 200]
        notice.give()
        assert await statuses(client) == [503, 503, 200, 200]
        assert (await client.get("/ready")).json()["error"]["code"] == "draining"


async def test_readiness_fails_before_the_listener_closes() -> None:
    """What the gateway does when Serve stops it, over real sockets and gRPC's health service."""
    notice = DrainNotice()
    grpc_server = build_grpc_server(
        build_core(FakeBackend()), OPEN_TO_ALL, GrpcServerConfig(port=0), is_draining=lambda: notice.is_given
    )
    await grpc_server.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(door(notice), log_config=None, lifespan="off", timeout_keep_alive=600)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        leaving = asyncio.create_task(announce_leave(notice, grpc_server, settle_s=3600))
        while not notice.is_given:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient(base_url=address, timeout=None) as client:
            assert await statuses(client) == [503, 503, 200, 200]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel:
            asked = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            answer = await health_pb2_grpc.HealthStub(channel).Check(asked)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not leaving.done()
        leaving.cancel()
        server.should_exit = True
        await serving
    await grpc_server.stop(0)
    with pytest.raises(httpx.ConnectError):
        await httpx.AsyncClient(timeout=None).get(address)


def test_the_hook_of_a_pod_gives_notice(tmp_path: Path) -> None:
    file = tmp_path / "draining"
    notice = DrainNotice(file)
    assert not notice.is_given
    drain(["--file", str(file), "--port", "1", "--settle-s", "0"])
    assert notice.is_given


def test_a_file_of_an_earlier_life_of_the_pod_means_nothing(tmp_path: Path) -> None:
    file = tmp_path / "draining"
    file.touch()
    earlier = time.time() - 60
    os.utime(file, (earlier, earlier))
    assert not DrainNotice(file).is_given
    assert not DrainNotice(tmp_path / "absent").is_given
