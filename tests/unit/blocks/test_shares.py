"""Whose cached blocks go first."""

from __future__ import annotations

import pytest

from cache_svc.blocks.invariants import check_pool
from cache_svc.blocks.pool import BlockPool, Evicted
from cache_svc.blocks.shares import Shares


def keep(pool: BlockPool, owner: bytes, count: int) -> list[int]:
    """So many new blocks of that owner become cached, one after the other."""
    kept = []
    for _ in range(count):
        (block_id,) = pool.allocate(1, owner=owner) or []
        pool.publish(block_id, bytes([pool.num_evictions, block_id]) * 16)
        pool.release([block_id])
        kept.append(block_id)
    return kept


def owners(pool: BlockPool) -> list[bytes]:
    """Who has something cached, least recently used first."""
    assert check_pool(pool, [], []) == []
    return [pool.owner_of(block_id) for block_id in pool.cached_ids()]


def test_a_flood_of_one_owner_leaves_what_others_keep() -> None:
    pool = BlockPool(8, most_per_owner=4)
    keep(pool, b"quiet", 3)
    keep(pool, b"flood", 100)
    assert owners(pool) == [b"quiet"] * 3 + [b"flood"] * 5
    assert pool.num_evictions == pool.num_share_evictions == 95


def test_without_a_share_the_least_recently_used_goes_whoever_has_it() -> None:
    pool = BlockPool(8)
    keep(pool, b"quiet", 3)
    keep(pool, b"flood", 100)
    assert pool.owner_of(0) == b""
    assert (pool.num_evictions, pool.num_share_evictions) == (95, 0)


def test_one_owner_may_have_all_that_nobody_else_wants_and_gives_back_what_is_beyond_its_share() -> None:
    pool = BlockPool(8, most_per_owner=4)
    keep(pool, b"first", 8)
    assert owners(pool) == [b"first"] * 8
    keep(pool, b"second", 6)
    assert owners(pool) == [b"first"] * 4 + [b"second"] * 4
    assert (pool.num_evictions, pool.num_share_evictions) == (6, 2), "what was the oldest anyway is not counted"


def test_of_several_with_too_much_the_least_recently_used_block_goes() -> None:
    pool = BlockPool(8, most_per_owner=2)
    for owner, count in ((b"a", 2), (b"b", 3), (b"c", 3), (b"d", 2)):
        keep(pool, owner, count)
    assert owners(pool) == [b"a", b"a", b"b", b"b", b"c", b"c", b"d", b"d"]


def test_those_with_too_much_take_turns_by_when_a_block_was_used_last() -> None:
    pool = BlockPool(6, most_per_owner=1)
    taken = {owner: pool.allocate(3, owner=owner) or [] for owner in (b"a", b"b")}
    order = [taken[b"b"][2], taken[b"a"][2], taken[b"b"][0], taken[b"a"][1], taken[b"a"][0], taken[b"b"][1]]
    for block_id in order:
        pool.publish(block_id, bytes([block_id]) * 32)
        pool.release([block_id])
    evicted: list[Evicted] = []
    assert pool.allocate(4, owner=b"c", evicted=evicted) is not None
    assert [entry.block_id for entry in evicted] == order[:4]


def test_an_owner_of_nothing_is_nobody() -> None:
    pool = BlockPool(4, most_per_owner=2)
    for number in range(100):
        assert pool.allocate(0, owner=bytes([number])) == []
    assert check_pool(pool, [], []) == []


def test_what_an_owner_uses_counts_for_it_and_its_own_go_first() -> None:
    pool = BlockPool(8, most_per_owner=4)
    quiet, flood = keep(pool, b"quiet", 3), keep(pool, b"flood", 3)
    assert pool.allocate(2, owner=b"flood") is not None
    evicted: list[Evicted] = []
    assert pool.allocate(4, owner=b"flood", evicted=evicted) is not None
    assert [entry.owner for entry in evicted] == [b"flood"] * 3 + [b"quiet"], "others only when it has nothing left"
    assert [entry.block_id for entry in evicted] == [*flood, quiet[0]]


@pytest.mark.parametrize("how", ["flush", "unpublish"])
def test_what_is_forgotten_counts_for_nobody(how: str) -> None:
    pool = BlockPool(8, most_per_owner=2)
    kept = keep(pool, b"a", 5)
    if how == "flush":
        pool.flush()
    else:
        for block_id in kept:
            pool.unpublish(block_id)
    assert pool.shares is not None
    assert pool.shares.first() is None
    assert pool.shares.check([], []) == []
    assert owners(pool) == []


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="most = 0"):
        Shares(8, 0)


def test_the_check_finds_what_is_not_as_it_should_be() -> None:
    shares = Shares(4, 1)
    shares.charge(3, b"a")
    shares.taken([0, 1, 2], b"a")
    shares.cached(0)
    shares.cached(1)
    assert shares.check([0, 1, 2], [0, 1]) == []
    assert [line.split()[0] for line in shares.check([0], [1, 0])] == ["held", "cached", "too"]
