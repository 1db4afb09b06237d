"""What a pool does with known content. The random walk through all of it is `tests/property/test_pool_machine.py`."""

from __future__ import annotations

import pytest

from cache_svc.blocks.hashing import extend_chain, root_key
from cache_svc.blocks.invariants import check_pool
from cache_svc.blocks.pool import BlockPool, Evicted

A, B, C, D, E = (bytes([number]) * 32 for number in range(5))


def publish(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """Blocks with one reference that hold the content of these keys."""
    block_ids = pool.allocate(len(keys))
    assert block_ids is not None
    assert all(pool.publish(block_id, key) for block_id, key in zip(block_ids, keys, strict=True))
    return block_ids


def test_content_is_found_while_used_in_flight_and_cached_and_gone_when_evicted() -> None:
    pool = BlockPool(2)
    (block_id,) = publish(pool, [A])
    assert pool.lookup(A) == block_id
    pool.release([block_id], fenced=True)
    assert (pool.lookup(A), pool.num_in_flight, pool.num_cached) == (block_id, 1, 0)
    pool.settle([block_id])
    assert (pool.lookup(A), pool.num_in_flight, pool.num_cached, pool.num_free) == (block_id, 0, 1, 1)
    evicted: list[Evicted] = []
    assert pool.allocate(1, evicted=evicted) == [1]
    assert evicted == [], "a block without content goes first"
    assert pool.allocate(1, evicted=evicted) == [block_id]
    assert evicted == [(block_id, A, b"")]
    assert (pool.lookup(A), pool.key_of(block_id), pool.num_evictions) == (None, None, 1)


def test_a_hit_takes_a_cached_block_out_of_the_eviction_order() -> None:
    pool = BlockPool(3)
    first, second, third = (publish(pool, [key]) for key in (A, B, C))
    for block_ids in (first, second, third):
        pool.release(block_ids)
    pool.retain(first)
    assert (pool.num_used, pool.num_cached, pool.lookup(A)) == (1, 2, first[0])
    assert pool.allocate(3) is None
    pool.release(first)
    assert pool.allocate(3) == [*second, *third, *first], "used last, evicted last"


def test_the_tail_of_a_table_is_evicted_before_its_head_also_when_two_share_it_and_fences_pass_together() -> None:
    pool = BlockPool(5)
    first = publish(pool, [A, B, C])
    second = [*first[:2], *publish(pool, [D, E])]
    pool.retain(first[:2])
    pool.release(first, fenced=True)
    pool.release(second, fenced=True)
    pool.settle([*first, *second])
    evicted: list[Evicted] = []
    assert pool.allocate(5, evicted=evicted) is not None
    assert [entry.key for entry in evicted] == [E, D, C, B, A]


def test_a_prefix_is_never_evicted_before_what_depends_on_it() -> None:
    """Whatever of three prompts with a common start has been evicted, the rest is found from the start on."""
    root = root_key("model", "bf16", b"", "")
    prompts = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7], [0, 1, 8, 9]]
    chains: list[list[bytes]] = [[] for _ in prompts]
    pool = BlockPool(9)
    tables = []
    for prompt, keys in zip(prompts, chains, strict=True):
        extend_chain(keys, root, prompt, 2, len(prompt) // 2)
        hits = [block_id for key in keys if (block_id := pool.lookup(key)) is not None]
        pool.retain(hits)
        tables.append(hits + publish(pool, keys[len(hits) :]))
    for table in (tables[1], tables[2], tables[0]):
        pool.release(table)
    for _ in range(9):
        assert pool.allocate(1) is not None
        for keys in chains:
            found = [pool.lookup(key) is not None for key in keys]
            assert found == sorted(found, reverse=True), "a hit behind a miss can never be used"


def test_the_second_block_with_some_content_stays_without_a_key() -> None:
    pool = BlockPool(2)
    (first,) = publish(pool, [A])
    (second,) = pool.allocate(1) or []
    assert pool.publish(first, A), "it is known already"
    assert not pool.publish(second, A)
    assert (pool.lookup(A), pool.key_of(second)) == (first, None)
    pool.release([second])
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.unpublish(first)
    assert pool.lookup(A) is None
    assert not pool.num_cached


def test_only_held_blocks_can_be_published_and_each_under_one_key() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="free"):
        pool.publish(0, A)
    (block_id,) = publish(pool, [A])
    for other in (B, b""):
        with pytest.raises(ValueError, match="another key"):
            pool.publish(block_id, other)
    pool.release([block_id])
    with pytest.raises(ValueError, match="another key"):
        pool.publish(block_id, B)
    assert pool.publish(block_id, A)
    assert (pool.num_cached, pool.lookup(A), pool.lookup(B)) == (1, block_id, None)


def test_a_block_in_flight_can_be_published_and_is_cached_when_settled() -> None:
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    assert block_ids == [0]
    pool.release(block_ids, fenced=True)
    assert pool.publish(0, A)
    pool.settle(block_ids)
    assert (pool.num_cached, pool.lookup(A)) == (1, 0)


def test_content_that_is_not_to_be_trusted_is_found_no_more_whatever_holds_the_block() -> None:
    pool = BlockPool(4)
    used, in_flight, cached = (publish(pool, [key])[0] for key in (A, B, C))
    pool.release([in_flight], fenced=True)
    pool.release([cached])
    for block_id in (used, in_flight, cached, 3):
        pool.unpublish(block_id)
    assert [pool.lookup(key) for key in (A, B, C)] == [None] * 3
    assert (pool.num_used, pool.num_in_flight, pool.num_cached, pool.num_free) == (1, 1, 0, 2)
    assert pool.num_evictions == 0
    pool.settle([in_flight])
    assert pool.num_free == 3
    assert check_pool(pool, [[used]], []) == []


def test_flush_forgets_everything_and_leaves_holders_their_blocks() -> None:
    pool = BlockPool(4)
    used, in_flight, cached = (publish(pool, [key])[0] for key in (A, B, C))
    pool.release([in_flight], fenced=True)
    pool.release([cached])
    assert pool.flush() == 3
    assert pool.flush() == 0
    assert [pool.lookup(key) for key in (A, B, C)] == [None] * 3
    assert (pool.num_used, pool.num_in_flight, pool.num_cached, pool.num_free) == (1, 1, 0, 2)
    assert pool.num_evictions == 0
    assert pool.publish(used, C), "the key is to be had again"
    assert check_pool(pool, [[used]], [in_flight]) == []


def test_reserved_blocks_are_free_ones_first_and_then_cached_ones() -> None:
    pool = BlockPool(4)
    cached = publish(pool, [A, B])
    pool.release(cached)
    assert pool.reserve(1)
    assert (pool.num_free, pool.num_cached, pool.num_reserved, pool.num_allocatable) == (1, 2, 1, 3)
    assert pool.reserve(2)
    assert (pool.num_free, pool.num_cached, pool.num_reserved, pool.num_allocatable) == (0, 1, 3, 1)
    assert not pool.reserve(2)
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [2]
    assert (pool.num_free, pool.num_cached, pool.num_reserved, pool.num_allocatable) == (0, 0, 3, 0)
    evicted: list[Evicted] = []
    assert pool.allocate(3, reserved=True, evicted=evicted) == [3, cached[1], cached[0]]
    assert [entry[:2] for entry in evicted] == [(cached[1], B), (cached[0], A)]


def test_a_hit_never_takes_a_cached_block_that_is_promised() -> None:
    """Else the holder of the promise would find nothing to allocate, in the middle of a step."""
    pool = BlockPool(2)
    cached = publish(pool, [A, B])
    pool.release(cached)
    assert pool.num_cached_in([*cached, *cached]) == 2
    assert pool.reserve(1)
    with pytest.raises(ValueError, match="reserved"):
        pool.retain(cached)
    assert check_pool(pool, [], []) == []
    pool.retain([cached[0], cached[0]])
    pool.release(cached[:1])
    assert pool.num_cached_in(cached) == 1
    with pytest.raises(ValueError, match="reserved"):
        pool.retain(cached)
    pool.retain(cached[:1])
    assert pool.allocate(1, reserved=True) == cached[1:]


def test_the_check_names_each_lie_about_keys_and_lists() -> None:
    pool = BlockPool(4)
    used, cached, lost = (publish(pool, [key])[0] for key in (A, B, C))
    pool.release([cached])
    pool.release([lost])

    def problems() -> str:
        return "\n".join(check_pool(pool, [[used]], []))

    assert problems() == ""
    pool._index[D] = used
    assert "3 blocks have a key, the index has 4" in problems()
    pool._index[A] = cached
    assert f"block {used}: its key is found at {cached}" in problems()
    pool._index[A] = used
    del pool._index[D]
    del pool._cached[lost]
    assert f"block {lost}: 0 times on the cached list, 1 explained" in problems()
    assert "free + used" in problems()
    pool._free.append(lost)
    assert f"block {lost}: 1 times on the free list, 0 explained" in problems()
    pool._free.pop()
    pool._cached[lost] = None
    pool.num_reserved = 4
    assert "reserved, 1 more than free or cached" in problems()
    pool.num_reserved = 0
    assert "block 9: 0 references, 1 explained" in check_pool(pool, [[used, 9]], [])
