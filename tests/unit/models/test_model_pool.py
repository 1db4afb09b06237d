"""Blocks are zeroed, laid out block by block, and plain bytes to whoever moves them."""

from __future__ import annotations

import resource

import pytest
import torch

from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.pool import KvPool

GEOMETRY = KvGeometry(num_layers=2, num_kv_heads=1, head_dim=2, block_size=3, dtype=torch.float32)


def numbered(num_blocks: int) -> KvPool:
    pool = KvPool(GEOMETRY, num_blocks)
    pool.blocks.values[:] = torch.arange(num_blocks, dtype=torch.float32).view(-1, 1, 1, 1, 1, 1)
    return pool


def test_a_block_is_one_contiguous_region_of_the_stated_size() -> None:
    pool = KvPool(GEOMETRY, 5)
    assert pool.blocks.values.shape == (5, 2, 2, 1, 3, 2)
    assert pool.blocks.values.is_contiguous()
    assert pool.blocks.values[0].nbytes == GEOMETRY.bytes_per_block == 96
    assert not pool.blocks.values.any()


def test_memory_is_not_taken_before_it_is_written() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    geometry = KvGeometry(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)
    pool = KvPool(geometry, 8192)  # 3 GB
    pool.blocks.values[17] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_what_is_stored_is_gathered_layer_by_layer() -> None:
    pool = KvPool(GEOMETRY, 4)
    blocks = pool.blocks
    kv = torch.randn(3, 2, 1, 2)
    blocks.store(1, blocks.store_index(torch.tensor([2 * 3 + 1, 0 * 3 + 2, 3 * 3])), kv)
    assert torch.equal(blocks.values[[2, 0, 3], 1, :, :, [1, 2, 0]], kv)
    assert int(blocks.values.count_nonzero()) == kv.numel()
    read = blocks.gather(1, blocks.gather_index(torch.tensor([[2, 1], [0, 3]])), 2, torch.float32)
    expected = blocks.values[[2, 1, 0, 3], 1].view(2, 2, 2, 1, 3, 2)  # row, block, K or V, head, position, number
    assert torch.equal(read, expected.permute(2, 0, 3, 1, 4, 5).reshape(2, 2, 6, 2))


def test_block_bytes_are_the_pool_itself() -> None:
    pool = numbered(4)
    blocks = pool.block_bytes()
    assert blocks.shape == (4, GEOMETRY.bytes_per_block)
    blocks[1] = blocks[3]
    assert (pool.blocks.values[1] == 3).all()
    pool.blocks.values[0] = 3
    assert bytes(blocks[0]) == bytes(blocks[3])


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        KvPool(GEOMETRY, 0)
