"""Which kernel serves: the compiled one where it can, torch where it cannot, an error where it was insisted on."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_builders import make_reference, make_runner, save_model

from workers.native.build import NativeUnavailableError
from workers.runner_config import RunnerConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", make_reference("llama"))


def test_auto_takes_the_kernels_for_bfloat16_and_torch_for_the_rest(folder: Path) -> None:
    assert make_runner(folder, dtype="bfloat16").model.kernel.startswith("native-")
    assert make_runner(folder, dtype="bfloat16", block_size=8).model.kernel == "torch"
    assert make_runner(folder, dtype="float32").model.kernel == "torch"
    assert make_runner(folder, dtype="bfloat16", kernel="torch").model.kernel == "torch"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"dtype": "float32"}, "not float32"), ({"dtype": "bfloat16", "block_size": 8}, "block_size is 8")],
)
def test_insisting_on_kernels_that_do_not_fit_names_the_reason(folder: Path, changes: dict, words: str) -> None:
    with pytest.raises(NativeUnavailableError, match=words):
        make_runner(folder, kernel="native", **changes)


def test_kernels_and_torch_lay_kv_out_differently_and_say_so(folder: Path) -> None:
    identities = [make_runner(folder, dtype="bfloat16", kernel=kernel).identity for kernel in ("native", "torch")]
    assert identities[0].encode() != identities[1].encode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "int8"}, "dtype is 'int8', must be one of auto, bfloat16"),
        ({"block_size": 24}, "block_size is 24, must be a power of two"),
        ({"block_size": 512}, "block_size is 512, must be from 1 to 256"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"kv_cache_bytes": None}, "both None"),
        ({"threads": 0}, "threads is 0, must be from 1 to 1024"),
        ({"kernel": "numba"}, "kernel is 'numba'"),
    ],
)
def test_settings_are_checked_with_value_and_range(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RunnerConfig(**changes)
