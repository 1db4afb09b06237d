"""Blocks are zeroed, laid out block by block, and copied as if pair after pair."""

from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20))
def test_copies_act_as_if_one_after_another(pairs: list[tuple[int, int]]) -> None:
    pool = numbered(8)
    expected = list(range(8))
    for src, dst in pairs:
        expected[dst] = expected[src]
    pool.copy_blocks([s for s, _ in pairs], [d for _, d in pairs])
    assert pool.blocks.values[:, 0, 0, 0, 0, 0].tolist() == expected


@given(st.integers(0, 7), st.integers(0, 7), st.integers(1, 8))
def test_long_runs_that_overlap(src: int, dst: int, length: int) -> None:
    length = min(length, 8 - max(src, dst))
    test_copies = [(src + i, dst + i) for i in range(length)]
    pool = numbered(8)
    expected = list(range(8))
    for s, d in test_copies:
        expected[d] = expected[s]
    pool.copy_blocks([s for s, _ in test_copies], [d for _, d in test_copies])
    assert pool.blocks.values[:, 1, 1, 0, 2, 1].tolist() == expected


@pytest.mark.parametrize(("src", "dst"), [([8], [0]), ([0], [-1]), ([0, 1], [2])])
def test_bad_copies_are_refused(src: list[int], dst: list[int]) -> None:
    pool = numbered(8)
    with pytest.raises(ValueError, match=r"outside the pool|destinations"):
        pool.copy_blocks(src, dst)
    assert pool.blocks.values[:, 0, 0, 0, 0, 0].tolist() == list(range(8))


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        KvPool(GEOMETRY, 0)
