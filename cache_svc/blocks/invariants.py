"""Checks that explain every block of a pool. Cheap enough to call when idle; they change nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cache_svc.blocks.pool import BlockPool


def check_pool(pool: BlockPool, tables: Iterable[list[int]], fenced: Iterable[int]) -> list[str]:
    """What is wrong, one line each; empty when every reference and every fence is explained.

    `tables` are all lists that own references, `fenced` is every id given to `settle` in future, with repeats.
    """
    refs = Counter(block_id for table in tables for block_id in table)
    fences = Counter(fenced)
    free = pool.free_ids()
    on_free_list = Counter(free)
    problems = _check_counts(pool, len(free))
    for block_id in range(pool.num_blocks):
        if pool.num_refs(block_id) != refs[block_id]:
            problems.append(f"block {block_id}: {pool.num_refs(block_id)} references, {refs[block_id]} explained")
        if pool.num_fences(block_id) != fences[block_id]:
            problems.append(f"block {block_id}: {pool.num_fences(block_id)} fences, {fences[block_id]} explained")
        held = bool(pool.num_refs(block_id) or pool.num_fences(block_id))
        if on_free_list[block_id] != (0 if held else 1):
            problems.append(f"block {block_id}: {on_free_list[block_id]} times on the free list, {held = }")
    return problems


def _check_counts(pool: BlockPool, num_on_free_list: int) -> list[str]:
    """Conservation, and the two counters against the per-block state."""
    problems = []
    total = pool.num_free + pool.num_used + pool.num_cached + pool.num_in_flight + pool.num_reserved
    if total != pool.num_blocks:
        problems.append(f"free + used + cached + in flight + reserved = {total}, not {pool.num_blocks}")
    if pool.num_reserved > num_on_free_list:
        problems.append(f"{pool.num_reserved} blocks are reserved, {num_on_free_list} are free")
    ids = range(pool.num_blocks)
    num_used = sum(1 for block_id in ids if pool.num_refs(block_id))
    if num_used != pool.num_used:
        problems.append(f"{num_used} blocks have references, the counter says {pool.num_used}")
    num_in_flight = sum(1 for block_id in ids if not pool.num_refs(block_id) and pool.num_fences(block_id))
    if num_in_flight != pool.num_in_flight:
        problems.append(f"{num_in_flight} blocks are in flight, the counter says {pool.num_in_flight}")
    return problems
