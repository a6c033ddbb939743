"""Every way to reach a Redis: TLS, ACL users, Sentinel, Cluster; and the limits of a client."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from free_ports import free_port
from index_harness import PATIENCE_S, PATIENT, FollowerHarness, keys, prints, settings_of, stored
from redis.backoff import NoBackoff
from redis.retry import Retry
from tcp_proxy import TcpProxy

from cache_service.embedded import EmbeddedRedis, find_server
from cache_service.events import EventBatch
from cache_service.redis_client import GuardedRedis, RedisLimits, RedisUnavailableError, connect
from cache_service.redis_index import IndexSettings, RedisIndex
from cluster.api.ids import WorkerId

A, B = WorkerId("worker-a"), WorkerId("worker-b")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "redis")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(private, hashes.SHA256())
    )
    certificate, key = tmp_path / "redis.crt", tmp_path / "redis.key"
    certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    key.write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return certificate, key


async def test_tls_with_a_certificate_that_is_checked(
    redis_server: EmbeddedRedis, certificate: tuple[Path, Path], namespace: str
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with TcpProxy(redis_server.port, tls=context) as proxy:
        url = redis_server.url.replace("redis://", "rediss://").replace(f":{redis_server.port}/", f":{proxy.port}/")
        stranger = GuardedRedis(url, PATIENT)
        with pytest.raises(RedisUnavailableError):
            await stranger.run([("PING",)])
        await stranger.aclose()
        await _works(f"{url}?ssl_ca_certs={certificate[0]}", settings_of(namespace))


async def test_an_acl_user_needs_no_more_than_its_own_keys(redis_server: EmbeddedRedis, namespace: str) -> None:
    with redis.Redis.from_url(redis_server.url) as admin:
        rules = ("on", ">s%cr@t", f"~ww:{{{namespace}:*", "resetchannels", "-@all")
        commands = "eval hmget hget hset hsetnx hdel hgetall hincrby expire exists time zadd zrem zrangebyscore xadd"
        commands += " xread xinfo|stream info set"
        admin.execute_command("ACL", "SETUSER", "watchword", *rules, *(f"+{name}" for name in commands.split()))
    url = f"redis://watchword:s%25cr%40t@127.0.0.1:{redis_server.port}/0"
    await _works(url, settings_of(namespace))
    stranger = RedisIndex(GuardedRedis(url, PATIENT), settings_of("foreign"))
    for refused in (stranger.claim(A, "e1", 1), stranger.status(), stranger.match(keys(1))):
        with pytest.raises(RedisUnavailableError, match="NoPermission"):
            await refused
    await stranger.redis.aclose()


@pytest.fixture
def sentinel(redis_server: EmbeddedRedis, tmp_path: Path, dead_port: int) -> Iterator[str]:
    """A sentinel that watches the server, as a URL, after one that does not answer."""
    password = redis_server.url.split(":")[2].partition("@")[0]
    config = tmp_path / "sentinel.conf"
    port = free_port()
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nprotected-mode no\ndir {tmp_path}\n"
        f"sentinel monitor main 127.0.0.1 {redis_server.port} 1\nsentinel auth-pass main {password}\n"
    )
    process = subprocess.Popen([find_server(), config, "--sentinel"], stdout=subprocess.DEVNULL)
    _await_server(port, process)
    yield f"redis+sentinel://:{password}@127.0.0.1:{dead_port},127.0.0.1:{port}/main"
    process.kill()
    process.wait()


async def test_sentinels_name_the_master(sentinel: str, namespace: str) -> None:
    await _works(sentinel, settings_of(namespace))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Three nodes with a third of the slots each, as the URL of one of them."""
    ports, bus_ports = ([free_port() for _ in range(3)] for _ in range(2))
    processes = []
    for port, bus_port in zip(ports, bus_ports, strict=True):
        folder = tmp_path / str(port)
        folder.mkdir()
        options = f"--port {port} --bind 127.0.0.1 --dir {folder} --appendonly no --save".split()
        cluster = f"--cluster-enabled yes --cluster-port {bus_port} --cluster-node-timeout 60000".split()
        command = [find_server(), *options, "", *cluster]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    nodes = []
    for port, process in zip(ports, processes, strict=True):
        _await_server(port, process)
        nodes.append(redis.Redis(port=port))
    bounds = [0, 5461, 10923, 16384]
    for number, node in enumerate(nodes):
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for port, bus_port in zip(ports[1:], bus_ports[1:], strict=True):
        nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus_port)
    deadline = time.monotonic() + PATIENCE_S
    while any(node.cluster("INFO")["cluster_state"] != "ok" for node in nodes):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield f"redis+cluster://127.0.0.1:{ports[0]}"
    for node in nodes:
        node.close()
    for process in processes:
        process.kill()
        process.wait()


async def test_a_cluster_holds_the_shards_on_its_nodes(cluster: str, namespace: str) -> None:
    await _works(cluster, settings_of(namespace, num_shards=8))
    used = []
    for node in redis.RedisCluster.from_url(cluster.replace("+cluster", "")).get_primaries():
        with redis.Redis(port=node.port) as client:
            used.append(sum(namespace in name.decode() for name in client.keys("*")))
    assert all(used), f"every node holds a share: {used}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:6379", "scheme 'http', allowed are redis://"),
        ("redis+sentinel://127.0.0.1:26379", "lacks hosts or the master's name"),
        ("127.0.0.1:6379", "allowed are redis://"),
    ],
)
def test_a_url_that_names_no_redis_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        connect(url, RedisLimits())


def test_limits_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="deadline_s is 0, allowed are more than 0 up to 600 seconds"):
        RedisLimits(deadline_s=0)
    with pytest.raises(ValueError, match="max_in_flight is 0, allowed are 1 to 1024"):
        RedisLimits(max_in_flight=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"namespace": ""}, "namespace is ''"),
        ({"namespace": "a}b"}, "namespace is 'a}b'"),
        ({"namespace": "m", "num_shards": 0}, "num_shards is 0, allowed are 1 to 256"),
        ({"namespace": "m", "lease_s": 0.1}, "lease_s is 0.1, allowed are 0.5 to 3600"),
        ({"namespace": "m", "entry_ttl_s": 1}, "entry_ttl_s is 1, allowed are 60 to 604800"),
        ({"namespace": "m", "stream_length": 1}, "stream_length is 1, allowed are 16 to 1000000"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IndexSettings(**options)  # type: ignore[arg-type]


async def test_errors_name_no_address_password_or_key(dead_port: int) -> None:
    client = GuardedRedis(f"redis://user:hunter2@127.0.0.1:{dead_port}/0", PATIENT)
    with pytest.raises(RedisUnavailableError) as failure:
        await client.run([("GET", "some-key")])
    told = f"{failure.value} {failure.value.__cause__}"
    assert "failed with ConnectionError" in told
    assert not any(secret in told for secret in ("hunter2", str(dead_port), "127.0.0.1", "some-key"))
    await client.aclose()


@pytest.mark.parametrize("url", ["redis://{}", "redis+cluster://{}", "redis+sentinel://{}/main"])
async def test_whatever_is_away_is_told_in_one_way(url: str, dead_port: int) -> None:
    client = GuardedRedis(url.format(f"127.0.0.1:{dead_port}"), PATIENT)
    with pytest.raises(RedisUnavailableError):
        await client.run([("PING",)])
    await client.aclose()


async def _works(url: str, settings: IndexSettings) -> None:
    """Workers publish, a reader looks up, a follower follows."""
    harness = FollowerHarness(url, settings)
    try:
        for name, numbers in ((A, range(200)), (B, range(5))):
            await harness.apply(EventBatch(name, "e1", 1, (stored(*numbers),)))
        assert await harness.match(keys(*range(10))) == {A: 10, B: 5}
        assert await harness.reader.match(keys(*range(10))) == {A: 10, B: 5}
        assert await harness.keys(B) == prints(*range(5))
    finally:
        await harness.aclose()


def _await_server(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until the very process answers on that port."""
    deadline = time.monotonic() + PATIENCE_S
    with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client:
        while True:
            assert process.poll() is None, f"the server ended with {process.returncode}"
            try:
                found = client.info("server")["process_id"]
            except redis.ConnectionError:
                assert time.monotonic() < deadline, f"nothing listens on {port}"
                time.sleep(0.02)
                continue
            assert found == process.pid, "another server has the port"
            return
