"""The block pool against a model in plain lists: who refers to what, what each key holds, when it was last used.

The model knows nothing of free lists that hold ids of cached blocks or of counters that are kept up to date: it counts
anew each time, and finds the block to evict as the one with the smallest mark of last use.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_svc.blocks.invariants import check_pool
from cache_svc.blocks.pool import BlockPool, Evicted
from tests.property.campaign import machine_settings, machine_time_limit

KEYS = [bytes([number]) * 32 for number in range(7)]
"""So few that two blocks are often to be published under one key: as if somebody had forged a duplicate."""
OWNERS = st.sampled_from([b"a", b"a", b"b", b"c"])


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(4, 8), most_per_owner=st.sampled_from([None, 1, 2, 4]))
    def start(self, num_blocks: int, most_per_owner: int | None) -> None:
        self.pool = BlockPool(num_blocks, most_per_owner)
        self.most_per_owner = math.inf if most_per_owner is None else most_per_owner
        self.num_share_evictions = 0
        self.owner: dict[int, bytes] = {}
        """Of each block, who took it last."""
        self.tables: list[list[int]] = []
        self.fenced: list[list[int]] = []
        self.reserved = 0
        self.free_order = list(range(num_blocks))
        """The model's free list: whoever is here longest goes first."""
        self.holder: dict[bytes, int] = {}
        """The block that each key is to be found at."""
        self.last_use: dict[int, tuple[int, int]] = {}
        """Of each cached block: the number of the call that gave it back, and how far from the end of its table."""
        self.num_calls = 0
        self.num_evictions = 0

    def held(self, block_id: int) -> bool:
        return any(block_id in group for group in [*self.tables, *self.fenced])

    def has_key(self, block_id: int) -> bool:
        return block_id in self.holder.values()

    def given_back(self, block_ids: list[int]) -> None:
        """Whoever of these (tables, head first) is held by nobody now is cached or free."""
        self.num_calls += 1
        loose = [b for b in dict.fromkeys(block_ids) if not self.held(b)]
        for place, block_id in enumerate(reversed(loose)):
            if self.has_key(block_id):
                self.last_use[block_id] = (self.num_calls, place)
            else:
                self.free_order.append(block_id)

    def to_evict(self, count: int, num_taken: int, owner: bytes) -> list[int]:
        """So many cached blocks: each time the least recently used of owners who hold too many, or else of all.

        The owner counts as if it had the `num_taken` blocks already.
        """
        left = sorted(self.last_use, key=self.last_use.__getitem__)
        held = [block_id for block_id in range(self.pool.num_blocks) if block_id not in self.free_order]
        found = []
        for _ in range(count):
            sizes = Counter([owner] * num_taken + [self.owner[block_id] for block_id in held])
            over = [block_id for block_id in left if sizes[self.owner[block_id]] > self.most_per_owner]
            found.append((over or left)[0])
            self.num_share_evictions += found[-1] != left[0]
            left.remove(found[-1])
            held.remove(found[-1])
        return found

    @property
    def num_allocatable(self) -> int:
        return len(self.free_order) + len(self.last_use) - self.reserved

    def taken(self, block_ids: list[int] | None, count: int, evicted: list[Evicted], owner: bytes) -> None:
        """`count` blocks were given out: the free ones first, then the cached ones that are to go."""
        oldest = self.to_evict(max(0, count - len(self.free_order)), count, owner)
        assert block_ids == self.free_order[:count] + oldest
        key_of = {block_id: key for key, block_id in self.holder.items()}
        counts = self.pool.shares is not None
        assert evicted == [(b, key_of[b], self.owner[b] if counts else b"") for b in oldest]
        del self.free_order[:count]
        for block_id in oldest:
            del self.last_use[block_id], self.holder[key_of[block_id]]
        self.num_evictions += len(oldest)
        self.owner |= dict.fromkeys(block_ids, owner)
        self.tables.append(list(block_ids))

    @rule(count=st.integers(0, 9), owner=OWNERS)
    def allocate(self, count: int, owner: bytes) -> None:
        can = count <= self.num_allocatable
        assert can == (count <= self.pool.num_allocatable)
        evicted: list[Evicted] = []
        block_ids = self.pool.allocate(count, evicted=evicted, owner=owner)
        assert (block_ids is not None) == can
        if can:
            self.taken(block_ids, count, evicted, owner)
        else:
            assert evicted == []

    @rule(data=st.data(), first=st.integers(0, len(KEYS) - 1), fenced=st.booleans(), owner=OWNERS)
    def a_prompt_comes_and_goes(self, data: st.DataObject, first: int, fenced: bool, owner: bytes) -> None:
        """What fills the cache: without it, walks seldom get to where something is to be evicted."""
        self.allocate(data.draw(st.integers(0, self.num_allocatable)), owner)
        self.publish_chain(self.tables[-1], first)
        self.release_one(len(self.tables) - 1, fenced)

    @rule(count=st.integers(0, 5))
    def reserve(self, count: int) -> None:
        can = count <= self.num_allocatable
        assert self.pool.reserve(count) == can
        self.reserved += count if can else 0

    @rule(data=st.data(), take=st.booleans(), owner=OWNERS)
    def use_a_reservation(self, data: st.DataObject, take: bool, owner: bytes) -> None:
        count = data.draw(st.integers(0, self.reserved))
        self.reserved -= count
        if take:
            evicted: list[Evicted] = []
            block_ids = self.pool.allocate(count, reserved=True, evicted=evicted, owner=owner)
            self.taken(block_ids, count, evicted, owner)
        else:
            self.pool.unreserve(count)

    @rule(data=st.data(), fenced=st.booleans())
    def release(self, data: st.DataObject, fenced: bool) -> None:
        if self.tables:
            self.release_one(data.draw(st.integers(0, len(self.tables) - 1)), fenced)

    def release_one(self, index: int, fenced: bool) -> None:
        table = self.tables.pop(index)
        self.pool.release(table, fenced=fenced)
        if fenced:
            self.fenced.append(table)
        self.given_back(table)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Another sequence takes the head of a table, or of what a fence holds."""
        groups = [group for group in [*self.tables, *self.fenced] if group]
        if groups:
            group = groups[data.draw(st.integers(0, len(groups) - 1))]
            head = group[: data.draw(st.integers(1, len(group)))]
            self.pool.retain(head)
            self.tables.append(list(head))

    @rule(data=st.data(), twice=st.booleans())
    def hit(self, data: st.DataObject, twice: bool) -> None:
        """A sequence, or two at once, take what they find under some keys, unless that would break a promise."""
        wanted = data.draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=5))
        found = [block_id for key in wanted if (block_id := self.pool.lookup(key)) is not None]
        assert found == [self.holder[key] for key in wanted if key in self.holder]
        cached = [block_id for block_id in found if block_id in self.last_use]
        assert self.pool.num_cached_in(found + found) == len(cached)
        if len(cached) > self.num_allocatable:
            with pytest.raises(ValueError, match="less reserved"):
                self.pool.retain(found)
            return
        self.pool.retain(found * 2 if twice else found)
        self.tables += [found.copy() for _ in range(2 if twice else 1)]
        for block_id in cached:
            del self.last_use[block_id]

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """One fence passes, or several at once, which may hold the same block."""
        if self.fenced:
            count = data.draw(st.integers(1, len(self.fenced)))
            passed, self.fenced = self.fenced[:count], self.fenced[count:]
            block_ids = [block_id for table in passed for block_id in table]
            self.pool.settle(block_ids)
            self.given_back(block_ids)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        block_id = data.draw(st.integers(0, self.pool.num_blocks - 1))
        present = next((k for k, holder in self.holder.items() if holder == block_id), None)
        if (present is not None and present != key) or block_id in self.free_order:
            with pytest.raises(ValueError, match="Got block_id"):
                self.pool.publish(block_id, key)
            return
        assert self.pool.publish(block_id, key) == (self.holder.get(key, block_id) == block_id)
        self.holder.setdefault(key, block_id)

    @rule(data=st.data(), first=st.integers(0, len(KEYS) - 1))
    def publish_a_table(self, data: st.DataObject, first: int) -> None:
        """As a prompt does that has been computed: one key after another, where nobody has them yet."""
        if self.tables:
            self.publish_chain(self.tables[data.draw(st.integers(0, len(self.tables) - 1))], first)

    def publish_chain(self, table: list[int], first: int) -> None:
        for block_id, key in zip(table, KEYS[first:] + KEYS[:first], strict=False):
            if not self.has_key(block_id):
                assert self.pool.publish(block_id, key) == (key not in self.holder)
                self.holder.setdefault(key, block_id)

    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        block_id = data.draw(st.integers(0, self.pool.num_blocks - 1))
        self.pool.unpublish(block_id)
        self.holder = {key: holder for key, holder in self.holder.items() if holder != block_id}
        if self.last_use.pop(block_id, None) is not None:
            self.free_order.append(block_id)

    @rule()
    def flush(self) -> None:
        assert self.pool.flush() == len(self.holder)
        self.holder.clear()
        self.free_order += sorted(self.last_use, key=self.last_use.__getitem__)
        self.last_use.clear()

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def misuse_raises(self, data: st.DataObject, key: bytes) -> None:
        block_id = data.draw(st.integers(0, self.pool.num_blocks - 1))
        if not any(block_id in table for table in self.tables):
            with pytest.raises(ValueError, match="with a reference"):
                self.pool.release([*dict.fromkeys(b for table in self.tables for b in table), block_id])
        if not any(block_id in held for held in self.fenced):
            with pytest.raises(ValueError, match="fenced"):
                self.pool.settle([block_id])
        if block_id in self.free_order:
            with pytest.raises(ValueError, match="used, in flight or cached"):
                self.pool.retain([*self.holder.values(), block_id])
        for misuse in (
            lambda: self.pool.allocate(self.reserved + 1, reserved=True),
            lambda: self.pool.unreserve(self.reserved + 1),
            lambda: self.pool.unreserve(-1),
            lambda: self.pool.allocate(-1),
            lambda: self.pool.reserve(-1),
        ):
            with pytest.raises(ValueError, match="Got num_blocks"):
                misuse()

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        pool: Any = getattr(self, "pool", None)
        if pool is None:
            return
        fenced = [block_id for held in self.fenced for block_id in held]
        assert check_pool(pool, self.tables, fenced) == []
        used = {block_id for table in self.tables for block_id in table}
        assert pool.num_used == len(used)
        assert pool.num_in_flight == len(set(fenced) - used)
        assert pool.num_reserved == self.reserved
        from_free = min(self.reserved, len(self.free_order))
        assert pool.num_free == len(self.free_order) - from_free
        assert pool.num_cached == len(self.last_use) - (self.reserved - from_free)
        assert pool.num_allocatable == self.num_allocatable
        assert pool.num_evictions == self.num_evictions
        assert pool.num_share_evictions == self.num_share_evictions

    @invariant()
    def every_key_is_where_it_should_be(self) -> None:
        pool: Any = getattr(self, "pool", None)
        if pool is None:
            return
        assert pool.free_ids() == self.free_order
        assert pool.cached_ids() == sorted(self.last_use, key=self.last_use.__getitem__)
        for key in KEYS:
            assert pool.lookup(key) == self.holder.get(key)
        key_of = {block_id: key for key, block_id in self.holder.items()}
        assert [pool.key_of(block_id) for block_id in range(pool.num_blocks)] == [
            key_of.get(block_id) for block_id in range(pool.num_blocks)
        ]


TestPool = machine_time_limit(PoolMachine.TestCase)
TestPool.settings = machine_settings(250, 40)
