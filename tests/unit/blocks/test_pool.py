from __future__ import annotations

import pytest

from cache_svc.blocks.invariants import check_pool
from cache_svc.blocks.pool import BlockPool


def allocate(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.allocate(count)
    assert block_ids is not None
    return block_ids


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert allocate(pool, 4) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_the_longest_free_block_goes_first_and_tails_before_heads() -> None:
    pool = BlockPool(5)
    first, second = allocate(pool, 2), allocate(pool, 2)
    pool.release(second)
    pool.release(first)
    assert allocate(pool, 5) == [4, second[1], second[0], first[1], first[0]]


def test_a_shared_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(2)
    block_ids = allocate(pool, 1)
    pool.retain(block_ids)
    pool.release(block_ids)
    assert (pool.num_used, pool.num_free) == (1, 1)
    pool.release(block_ids)
    assert (pool.num_used, pool.num_free) == (0, 2)


def test_a_fenced_block_is_free_only_when_settled() -> None:
    pool = BlockPool(2)
    block_ids = allocate(pool, 2)
    pool.release(block_ids, fenced=True)
    assert (pool.num_free, pool.num_in_flight, pool.allocate(1)) == (0, 2, None)
    pool.settle(block_ids)
    assert (pool.num_free, pool.num_in_flight) == (2, 0)


def test_a_block_in_flight_may_be_shared_and_settles_without_being_freed() -> None:
    pool = BlockPool(1)
    block_ids = allocate(pool, 1)
    pool.release(block_ids, fenced=True)
    pool.retain(block_ids)
    pool.settle(block_ids)
    assert (pool.num_used, pool.num_free) == (1, 0)
    pool.release(block_ids)
    assert pool.num_free == 1


def test_two_fences_hold_until_both_have_passed() -> None:
    pool = BlockPool(1)
    block_ids = allocate(pool, 1)
    pool.retain(block_ids)
    pool.release(block_ids, fenced=True)
    pool.release(block_ids, fenced=True)
    pool.settle(block_ids)
    assert pool.num_in_flight == 1
    pool.settle(block_ids)
    assert pool.num_free == 1


def test_reserved_blocks_go_only_to_their_holder() -> None:
    pool = BlockPool(3)
    assert pool.reserve(2)
    assert not pool.reserve(2)
    assert pool.allocate(2) is None
    assert len(allocate(pool, 1)) == 1
    assert len(pool.allocate(2, reserved=True) or []) == 2
    assert pool.num_reserved == 0


def test_misuse_raises_and_changes_nothing() -> None:
    pool = BlockPool(3)
    block_ids = allocate(pool, 1)
    for misuse in (
        lambda: pool.release([block_ids[0], 2]),
        lambda: pool.retain([block_ids[0], 2]),
        lambda: pool.settle([block_ids[0]]),
        lambda: pool.unreserve(1),
        lambda: pool.allocate(1, reserved=True),
        lambda: BlockPool(0),
    ):
        with pytest.raises(ValueError, match="Got"):
            misuse()
        assert check_pool(pool, [block_ids], []) == []


def test_the_check_names_what_is_not_explained() -> None:
    pool = BlockPool(3)
    block_ids = allocate(pool, 2)
    assert "references" in check_pool(pool, [block_ids[:1]], [])[0]
    assert "fences" in check_pool(pool, [block_ids], [block_ids[0]])[0]
    pool.num_used += 1
    assert "free + used" in check_pool(pool, [block_ids], [])[0]
    pool.num_used -= 1
    pool._free.append(block_ids[0])
    assert any("on the free list" in problem for problem in check_pool(pool, [block_ids], []))
