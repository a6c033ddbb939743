"""The start-up self-test sees what breaks bit-exactness: it passes with the guards and fails without them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from model_builders import chunked_logits, make_prompt, make_reference, make_runner, save_model

from workers.kv_cache import KVCache
from workers.model.batch import Batch
from workers.model.linear import Product, RowTile
from workers.model.torch_model import TorchModel
from workers.self_test import run_self_test

# Products of this size take another algorithm for a few rows; tiny ones may not.
WIDE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("wide"), make_reference("llama", **WIDE))


def torch_model(folder: Path) -> TorchModel:
    model = make_runner(folder, kernel="torch").model
    assert isinstance(model, TorchModel)
    return model


def test_float32_is_bit_exact_with_row_tiles_and_not_without(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch_model(folder)
    bare = run_self_test(model, 16, 256, 16, may_tile=False)
    if bare.is_bit_exact:
        pytest.skip("this machine's float32 products do not depend on the number of rows")
    assert any(bare.variant_counts.values())
    assert "BIT-EXACT MODE IS OFF" in caplog.text
    guarded = run_self_test(model, 16, 256, 16)
    assert guarded.is_bit_exact, guarded.failures
    assert guarded.row_tile == model.row_tile.rows


def test_without_row_tiles_a_decoded_row_has_other_bits(folder: Path) -> None:
    prompt, table = make_prompt(40), [0, 1, 2]
    exact, loose = (
        make_runner(folder, kernel="torch", self_test=True, row_padding=padding) for padding in (True, False)
    )
    if loose.model.row_tile.rows is None and torch.equal(*both_ways(loose, prompt, table)):
        pytest.skip("this machine's float32 products do not depend on the number of rows")
    assert torch.equal(*both_ways(exact, prompt, table))
    assert not torch.equal(*both_ways(loose, prompt, table))
    assert loose.numerics.startswith("inexact-")
    assert not exact.numerics.startswith("inexact-")


def both_ways(runner, prompt: list[int], table: list[int]) -> list[torch.Tensor]:
    return [chunked_logits(runner, prompt, table, chunks) for chunks in ((40,), (39, 1))]


class TileFollowsBatch:
    """The forward pass with the fixed attention tile switched off: its length depends on the step's tokens."""

    def __init__(self, model: TorchModel) -> None:
        self.model = model
        self.spec, self.dtype, self.kernel, self.kv_layout = model.spec, model.dtype, model.kernel, model.kv_layout

    @property
    def row_tile(self) -> RowTile:
        return self.model.row_tile

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        return self.model.kv_block_shape(block_size)

    def row_products(self) -> dict[str, tuple[int, Product]]:
        return self.model.row_products()

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        for layer in self.model.layers:
            layer.tile_tokens = 16 if batch.num_tokens <= 16 else 64
        return self.model.forward(batch, cache)


def test_a_tile_that_follows_the_batch_is_caught(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch_model(folder)
    assert run_self_test(model, 16, 256, 16).is_bit_exact
    report = run_self_test(TileFollowsBatch(model), 16, 256, 16)
    assert not report.is_bit_exact
    assert any("chunks" in failure for failure in report.failures)


def test_equal_machines_and_weights_give_equal_numerics(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "one", make_reference("llama"))
    first, second = (make_runner(folder, kernel="torch", self_test=True).numerics for _ in range(2))
    other = save_model(tmp_path / "other", make_reference("llama", seed=1))
    assert first == second
    assert make_runner(other, kernel="torch", self_test=True).numerics != first
    assert make_runner(folder, kernel="torch", self_test=True, dtype="bfloat16").numerics != first


@pytest.mark.weights
def test_the_default_model_is_bit_exact_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    runner = make_runner(None, dtype="auto", self_test=True)
    assert not runner.numerics.startswith("inexact-"), caplog.text
