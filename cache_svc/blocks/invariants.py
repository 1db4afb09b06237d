"""Checks that explain every block of a pool. They change nothing.

When all is well, `check_pool` compares whole lists, about 1 µs a block; it looks at blocks one by one only
to say what is wrong. `check_conservation` does not depend on the number of blocks and may run at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cache_svc.blocks.pool import BlockPool


def check_conservation(pool: BlockPool) -> list[str]:
    """What is wrong with the counters of the pool, one line each; O(1)."""
    problems = []
    total = pool.num_free + pool.num_used + pool.num_cached + pool.num_in_flight + pool.num_reserved
    if total != pool.num_blocks:
        problems.append(f"free + used + cached + in flight + reserved = {total}, not {pool.num_blocks}")
    if pool.num_allocatable < 0:
        problems.append(f"{pool.num_reserved} blocks are reserved, {-pool.num_allocatable} more than free or cached")
    return problems


def check_pool(pool: BlockPool, tables: Iterable[Sequence[int]], fenced: Iterable[int]) -> list[str]:
    """What is wrong, one line each; empty when every reference, every fence, both lists and every key are explained.

    `tables` are all lists that own references, `fenced` is every id given to `settle` in future, with repeats.
    """
    refs, fences, keys = pool.ref_counts(), pool.fence_counts(), pool.block_keys()
    loose = [block_id for block_id, held in enumerate(zip(refs, fences, strict=True)) if held == (0, 0)]
    free = [block_id for block_id in loose if keys[block_id] is None]
    cached = [block_id for block_id in loose if keys[block_id] is not None]
    return [
        *check_conservation(pool),
        *_check_counts("references", refs, (block_id for table in tables for block_id in table)),
        *_check_counts("fences", fences, fenced),
        *_check_list("free list", pool.free_ids(), free),
        *_check_list("cached list", pool.cached_ids(), cached),
        *_check_number("blocks have references", len(refs) - refs.count(0), pool.num_used),
        *_check_number("blocks are in flight", refs.count(0) - len(loose), pool.num_in_flight),
        *_check_keys(pool, keys),
        *_check_shares(pool),
    ]


def _check_counts(what: str, found: list[int], holders: Iterable[int]) -> Iterable[str]:
    """Every block has as many as there are holders, and every holder's block exists."""
    explained = Counter(holders)
    if explained == Counter({block_id: count for block_id, count in enumerate(found) if count}):
        return
    for block_id in sorted({*range(len(found)), *explained}):
        count = found[block_id] if 0 <= block_id < len(found) else 0
        if count != explained[block_id]:
            yield f"block {block_id}: {count} {what}, {explained[block_id]} explained"


def _check_list(what: str, found: list[int], expected: list[int]) -> Iterable[str]:
    """The list has exactly the blocks that it should have, once each; `expected` is in order of ids."""
    if sorted(found) == expected:
        return
    times, should = Counter(found), Counter(expected)
    for block_id in sorted(times.keys() | should.keys()):
        if times[block_id] != should[block_id]:
            yield f"block {block_id}: {times[block_id]} times on the {what}, {should[block_id]} explained"


def _check_number(what: str, counted: int, kept: int) -> Iterable[str]:
    if counted != kept:
        yield f"{counted} {what}, the counter says {kept}"


def _check_keys(pool: BlockPool, keys: list[bytes | None]) -> Iterable[str]:
    """Looking up the key of a block gives that block, and every key that can be looked up is some block's."""
    index = pool.index()
    if len(index) != len(keys) - keys.count(None):
        yield f"{len(keys) - keys.count(None)} blocks have a key, the index has {len(index)}"
    for block_id, key in enumerate(keys):
        if key is not None and index.get(key) != block_id:
            yield f"block {block_id}: its key is found at {index.get(key)}"


def _check_shares(pool: BlockPool) -> list[str]:
    """Every block that is not free counts for its owner."""
    if pool.shares is None:
        return []
    return pool.shares.check(set(range(pool.num_blocks)).difference(pool.free_ids()), pool.cached_ids())
