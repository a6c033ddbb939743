"""Blocks as bytes: fill, copy, checksum touch what they name and nothing else."""

from __future__ import annotations

import pytest
import torch

from workers.kv_cache import KVCache


@pytest.fixture
def cache() -> KVCache:
    cache = KVCache(3, 8, (2, 4, 16), torch.bfloat16)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0)))
    return cache


def test_fill_overwrites_whole_blocks_in_every_layer(cache: KVCache) -> None:
    before = cache.data.clone()
    cache.fill([2, 5], 7.0)
    assert bool((cache.data[:, [2, 5]] == 7.0).all())
    others = [0, 1, 3, 4, 6, 7]
    assert torch.equal(cache.data[:, others], before[:, others])
    cache.fill([], 1.0)
    assert torch.equal(cache.data[:, others], before[:, others])


def test_copies_run_in_order(cache: KVCache) -> None:
    before = cache.data.clone()
    cache.copy([(0, 1), (1, 2)])
    assert torch.equal(cache.data[:, 1], before[:, 0])
    assert torch.equal(cache.data[:, 2], before[:, 0])
    assert torch.equal(cache.data[:, 3:], before[:, 3:])


def test_checksum_sees_every_bit_of_its_block_alone(cache: KVCache) -> None:
    before = cache.checksum(range(8))
    assert len(set(before)) == 8
    bits = cache.data.view(torch.int16)
    for where in ((0, 3, 0, 0, 0), (2, 3, 1, 3, 15), (1, 3, 0, 2, 7)):
        for bit in (0, 7, 15):
            bits[where] ^= -(1 << 15) if bit == 15 else 1 << bit
            after = cache.checksum(range(8))
            assert [index for index in range(8) if after[index] != before[index]] == [3]
            bits[where] ^= -(1 << 15) if bit == 15 else 1 << bit
    assert cache.checksum(range(8)) == before


def test_equal_blocks_have_equal_checksums(cache: KVCache) -> None:
    cache.copy([(4, 6)])
    assert len(set(cache.checksum([4, 6]))) == 1
    assert all(0 <= value < 1 << 64 for value in cache.checksum(range(8)))
