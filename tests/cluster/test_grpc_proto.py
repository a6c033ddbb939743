"""The proto file: lint-clean, compatible with what its generated code says, and shipped with the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cluster
from cluster.proto.watchword.v1 import generation_pb2

ROOT = Path(cluster.__file__).parents[1]
PROTO = "cluster/proto/watchword/v1/generation.proto"


def test_the_generated_code_is_of_this_proto_file(tmp_path: Path) -> None:
    """`make proto` repairs a difference. Only the descriptor counts: the code around it varies with the compiler."""
    pytest.importorskip("grpc_tools")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", PROTO]
    subprocess.run(command, cwd=ROOT, check=True)
    fresh = (tmp_path / PROTO).with_name("generation_pb2.py")
    assert descriptor_of(fresh) == descriptor_of(Path(generation_pb2.__file__))


def descriptor_of(generated: Path) -> str:
    (line,) = (line for line in generated.read_text().splitlines() if "AddSerializedFile(" in line)
    return line


@pytest.mark.parametrize("command", [["lint"], ["format", "--diff", "--exit-code"]], ids=["lint", "format"])
def test_buf_has_nothing_to_say(command: list[str]) -> None:
    buf = Path(sys.executable).with_name("buf")
    if not buf.exists():
        pytest.skip("buf-bin is not installed")
    result = subprocess.run([buf, *command], cwd=ROOT / "cluster/proto", capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_every_sampling_field_can_be_left_unset() -> None:
    """Zero is a value (temperature 0 is greedy), so presence must be visible on the wire."""
    for field in generation_pb2.SamplingParams.DESCRIPTOR.fields:
        assert field.has_presence or field.is_repeated, field.name
