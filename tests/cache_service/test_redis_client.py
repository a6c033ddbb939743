"""Every way to reach a Redis: TLS, ACL users, Sentinel, Cluster; and the limits of a client."""

from __future__ import annotations

import datetime
import ipaddress
import socket
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
from index_harness import FollowerHarness, eventually, keys, prints, stored
from tcp_proxy import TcpProxy

from cache_service.embedded import EmbeddedRedis, find_server
from cache_service.events import EventBatch
from cache_service.redis_client import GuardedRedis, RedisLimits, RedisUnavailableError, connect
from cache_service.redis_index import IndexSettings
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
        stranger = GuardedRedis(url, RedisLimits(deadline_s=5))
        with pytest.raises(RedisUnavailableError):
            await stranger.run([("PING",)])
        await stranger.aclose()
        await _works(f"{url}?ssl_ca_certs={certificate[0]}", IndexSettings(namespace))


async def test_an_acl_user_needs_no_more_than_its_own_keys(redis_server: EmbeddedRedis, namespace: str) -> None:
    with redis.Redis.from_url(redis_server.url) as admin:
        rules = ("on", ">s%cr@t", f"~ww:{{{namespace}:*", "resetchannels", "-@all")
        commands = "eval hmget hget hset hsetnx hdel hgetall hincrby expire exists time zadd zrem zrangebyscore xadd"
        commands += " xread xinfo|stream info set"
        admin.execute_command("ACL", "SETUSER", "watchword", *rules, *(f"+{name}" for name in commands.split()))
    url = f"redis://watchword:s%25cr%40t@127.0.0.1:{redis_server.port}/0"
    await _works(url, IndexSettings(namespace))
    with pytest.raises(AssertionError):
        await _works(url, IndexSettings("foreign"), timeout_s=1.0)


@pytest.fixture
def sentinel(redis_server: EmbeddedRedis, tmp_path: Path, unused_port: int) -> Iterator[str]:
    """A sentinel that watches the server, as a URL."""
    password = redis_server.url.split(":")[2].partition("@")[0]
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {unused_port}\nbind 127.0.0.1\nprotected-mode no\ndir {tmp_path}\n"
        f"sentinel monitor main 127.0.0.1 {redis_server.port} 1\nsentinel auth-pass main {password}\n"
    )
    process = subprocess.Popen([find_server(), config, "--sentinel"], stdout=subprocess.DEVNULL)
    _await_port(unused_port)
    yield f"redis+sentinel://:{password}@127.0.0.1:1,127.0.0.1:{unused_port}/main"
    process.kill()
    process.wait()


async def test_sentinels_name_the_master(sentinel: str, namespace: str) -> None:
    """The first of the two sentinels does not answer."""
    await _works(sentinel, IndexSettings(namespace))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Three nodes with a third of the slots each, as the URL of one of them."""
    ports = [_free_cluster_port() for _ in range(3)]
    processes = []
    for port in ports:
        folder = tmp_path / str(port)
        folder.mkdir()
        options = f"--port {port} --bind 127.0.0.1 --cluster-enabled yes --dir {folder} --appendonly no --save".split()
        processes.append(subprocess.Popen([find_server(), *options, ""], stdout=subprocess.DEVNULL))
    nodes = []
    for port in ports:
        _await_port(port)
        nodes.append(redis.Redis(port=port))
    bounds = [0, 5461, 10923, 16384]
    for number, node in enumerate(nodes):
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for port in ports[1:]:
        nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port)
    deadline = time.monotonic() + 20
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
    await _works(cluster, IndexSettings(namespace, num_shards=8))
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


async def test_errors_name_no_address_password_or_key(unused_port: int) -> None:
    client = GuardedRedis(f"redis://user:hunter2@127.0.0.1:{unused_port}/0", RedisLimits(deadline_s=5))
    with pytest.raises(RedisUnavailableError) as failure:
        await client.run([("GET", "some-key")])
    told = f"{failure.value} {failure.value.__cause__}"
    assert "failed with ConnectionError" in told
    assert not any(secret in told for secret in ("hunter2", str(unused_port), "127.0.0.1", "some-key"))
    await client.aclose()


async def _works(url: str, settings: IndexSettings, timeout_s: float = 20.0) -> None:
    """Workers publish, a reader looks up, a follower follows."""
    harness = FollowerHarness(url, settings)
    try:
        for name, numbers in ((A, range(200)), (B, range(5))):
            publisher = await harness.publisher(name, "e1")
            publisher.publish(EventBatch(name, "e1", 1, (stored(*numbers),)))
            await eventually(lambda publisher=publisher: publisher.is_synced and not publisher.num_unsent, timeout_s)
        assert await harness.match(keys(*range(10))) == {A: 10, B: 5}
        assert await harness.reader.match(keys(*range(10))) == {A: 10, B: 5}
        assert await harness.keys(B) == prints(*range(5))
    finally:
        await harness.aclose()


def _free_cluster_port() -> int:
    """The bus listens on port + 10000."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            if port + 10_000 > 65_535:
                port -= 20_000
            try:
                bus.bind(("127.0.0.1", port + 10_000))
                return port
            except OSError:
                continue


def _await_port(port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on {port}")
