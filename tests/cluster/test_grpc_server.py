"""The gRPC server around the service: health, reflection, TLS, shared ports, configuration and an orderly stop."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_rig import ScriptedBackend, ask, collect, failure, front_door, until

from cluster.api.errors import InvalidRequestError
from cluster.grpc_health import HealthReporter
from cluster.grpc_server import GrpcServerConfig, build_grpc_server
from cluster.grpc_service import SERVICE_NAME
from cluster.proto.watchword.v1 import generation_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

# gRPC keeps one poller for the process, which complains about loops that are closed under it.
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def check(channel: grpc.aio.Channel, service: str) -> int:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


async def test_health_tells_life_and_readiness_apart() -> None:
    async with front_door(ScriptedBackend(ready=False)) as rig:
        assert await check(rig.channel, "") == SERVING
        assert await check(rig.channel, SERVICE_NAME) == NOT_SERVING
        rig.backend.ready = True
        watch = health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        while (await watch.read()).status != SERVING:
            pass
        watch.cancel()
        assert await check(rig.channel, SERVICE_NAME) == SERVING
        error = await failure(health_pb2_grpc.HealthStub(rig.channel).Check(health_pb2.HealthCheckRequest(service="x")))
        assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_a_check_tells_the_readiness_of_this_moment() -> None:
    async with front_door(ScriptedBackend(ready=False), readiness_period_s=3600) as rig:
        for ready in (True, False, True):
            rig.backend.ready = ready
            assert await check(rig.channel, SERVICE_NAME) == (SERVING if ready else NOT_SERVING)


async def test_a_check_during_the_stop_does_not_turn_health_back() -> None:
    async def is_ready() -> bool:
        return True

    reporter = HealthReporter(SERVICE_NAME, is_ready, period_s=3600)
    question = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    await reporter.start()
    assert (await reporter.servicer.Check(question, None)).status == SERVING
    reporter.stop()
    assert (await reporter.servicer.Check(question, None)).status == NOT_SERVING


async def test_health_can_be_watched() -> None:
    async with front_door() as rig:
        watch = health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == SERVING
        rig.backend.ready = False
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


@pytest.mark.parametrize("failing", ["raises", "hangs"])
async def test_a_backend_that_cannot_tell_is_not_ready(failing: str) -> None:
    class Broken(ScriptedBackend):
        async def is_ready(self) -> bool:
            if failing == "raises":
                raise ConnectionError("router is gone")
            await asyncio.sleep(3600)
            return True

    async with front_door(Broken()) as rig:
        assert await check(rig.channel, SERVICE_NAME) == NOT_SERVING


async def test_health_needs_no_key(keys_path: Path) -> None:
    async with front_door(keys_path=keys_path) as rig:
        assert await check(rig.channel, SERVICE_NAME) == SERVING


async def list_services(channel: grpc.aio.Channel) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    reply = await call.read()
    return [service.name for service in reply.list_services_response.service]


async def test_reflection_lists_the_services_when_it_is_on() -> None:
    async with front_door(config=GrpcServerConfig(is_reflection_on=True)) as rig:
        assert SERVICE_NAME in await list_services(rig.channel)


async def test_reflection_is_off_by_default() -> None:
    async with front_door() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_services(rig.channel)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_stop_turns_health_first_refuses_new_calls_and_lets_running_ones_end() -> None:
    hold = asyncio.Event()
    async with front_door(ScriptedBackend(answer="x" * 40, hold=hold)) as rig:
        watch = health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == SERVING
        running = asyncio.create_task(collect(rig.stub.Generate(ask())))
        await until(lambda: rig.backend.num_open == 1)
        stopping = asyncio.create_task(rig.server.stop(grace_s=600))
        assert (await watch.read()).status == NOT_SERVING
        assert not running.done()
        watch.cancel()
        async with grpc.aio.insecure_channel(rig.address, options=[("grpc.use_local_subchannel_pool", 1)]) as late:
            stub = generation_pb2_grpc.GenerationServiceStub(late)
            error = await failure(stub.Generate(ask()))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        hold.set()
        text, _ = await running
        assert text == "x" * 40
        await stopping


async def test_an_open_watch_does_not_hold_up_the_stop() -> None:
    async with front_door() as rig:
        watch = health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest(service=""))
        assert (await watch.read()).status == SERVING
        async with asyncio.timeout(60):
            await rig.server.stop(grace_s=3600)
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_a_watcher_that_stops_reading_holds_up_nobody() -> None:
    async with front_door() as rig:
        stub = health_pb2_grpc.HealthStub(rig.channel)
        stalled = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        await stalled.read()
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == SERVING
        for ready in (False, True) * 5:
            rig.backend.ready = ready
            assert (await watch.read()).status == (SERVING if ready else NOT_SERVING)
        watch.cancel()
        stalled.cancel()


async def test_stop_ends_what_outlives_the_grace() -> None:
    async with front_door(ScriptedBackend(is_endless=True, step_s=0.005)) as rig:
        running = asyncio.create_task(failure(rig.stub.Generate(ask())))
        await until(lambda: rig.backend.num_open == 1)
        await rig.server.stop(grace_s=0.2)
        await running
        await until(lambda: rig.backend.num_open == 0)


async def test_an_old_connection_is_renewed_without_breaking_a_stream() -> None:
    config = GrpcServerConfig(max_connection_age_s=0.2)
    async with front_door(ScriptedBackend(answer="x" * 30, step_s=0.02), config=config) as rig:
        text, _ = await collect(rig.stub.Generate(ask()))
        assert text == "x" * 30
        text, _ = await collect(rig.stub.Generate(ask(), wait_for_ready=True))
        assert text == "x" * 30


async def test_two_replicas_share_a_port() -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        async with front_door() as rig:
            config = replace(GrpcServerConfig(), port=port)
            servers = [build_grpc_server(rig.core, rig.authenticator, config) for _ in range(2)]
            assert [server.port for server in servers] == [port, port]
            for server in servers:
                await server.start()
                await server.stop(0)


async def test_an_address_in_use_is_a_clear_error() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        async with front_door() as rig:
            with pytest.raises(InvalidRequestError, match=f"cannot listen on 127.0.0.1:{port}"):
                build_grpc_server(rig.core, rig.authenticator, GrpcServerConfig(port=port))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key of loopback's address, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=localhost"
    subprocess.run([*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return cert, key


async def test_tls(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    config = GrpcServerConfig(tls_cert_file=cert, tls_key_file=key)
    async with front_door(config=config) as rig:
        plain = await failure(rig.stub.Generate(ask(), timeout=60))
        assert plain.code() is grpc.StatusCode.UNAVAILABLE
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        async with grpc.aio.secure_channel(rig.address, credentials) as channel:
            text, _ = await collect(generation_pb2_grpc.GenerationServiceStub(channel).Generate(ask(), timeout=60))
            assert text == "watch"


async def test_a_missing_tls_file_is_a_clear_error(tmp_path: Path) -> None:
    config = GrpcServerConfig(port=0, tls_cert_file=tmp_path / "no.pem", tls_key_file=tmp_path / "no.key")
    async with front_door() as rig:
        with pytest.raises(InvalidRequestError, match=r"no\.key"):
            build_grpc_server(rig.core, rig.authenticator, config)


@pytest.mark.parametrize(
    "wrong", [{"port": 70000}, {"tls_cert_file": Path("a")}, {"max_request_bytes": 0}, {"request_timeout_s": -1.0}]
)
async def test_a_config_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GrpcServerConfig(**wrong)  # type: ignore[arg-type]
