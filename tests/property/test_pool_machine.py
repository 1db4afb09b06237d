"""The block pool against a model that keeps, for each block, its references and its fences as plain numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_svc.blocks.invariants import check_pool
from cache_svc.blocks.pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(4, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.fenced: list[list[int]] = []
        self.reserved = 0
        self.free_order = list(range(num_blocks))
        """The model's free list: whoever is here longest goes first."""

    def held(self, block_id: int) -> bool:
        return any(block_id in group for group in [*self.tables, *self.fenced])

    def freed(self, block_ids: list[int]) -> None:
        self.free_order += [b for b in dict.fromkeys(block_ids) if not self.held(b)]

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        can = count <= len(self.free_order) - self.reserved
        assert can == (count <= self.pool.num_allocatable)
        block_ids = self.pool.allocate(count)
        assert (block_ids is not None) == can
        if block_ids is not None:
            assert block_ids == self.free_order[:count], "not the ones that were free the longest"
            del self.free_order[:count]
            self.tables.append(block_ids)

    @rule(count=st.integers(0, 9))
    def reserve(self, count: int) -> None:
        can = count <= len(self.free_order) - self.reserved
        assert self.pool.reserve(count) == can
        self.reserved += count if can else 0

    @rule(data=st.data(), take=st.booleans())
    def use_a_reservation(self, data: st.DataObject, take: bool) -> None:
        count = data.draw(st.integers(0, self.reserved))
        self.reserved -= count
        if take:
            block_ids = self.pool.allocate(count, reserved=True)
            assert block_ids == self.free_order[:count]
            del self.free_order[:count]
            self.tables.append(block_ids)
        else:
            self.pool.unreserve(count)

    @rule()
    def more_than_is_reserved_is_refused(self) -> None:
        with pytest.raises(ValueError, match="reserved"):
            self.pool.allocate(self.reserved + 1, reserved=True)
        with pytest.raises(ValueError, match="reserved"):
            self.pool.unreserve(self.reserved + 1)

    @rule(data=st.data(), fenced=st.booleans())
    def release(self, data: st.DataObject, fenced: bool) -> None:
        if self.tables:
            table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
            self.pool.release(table, fenced=fenced)
            if fenced:
                self.fenced.append(table)
            self.freed(table[::-1])

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Another sequence takes the head of a table, or of what a fence holds."""
        groups = [group for group in [*self.tables, *self.fenced] if group]
        if groups:
            group = groups[data.draw(st.integers(0, len(groups) - 1))]
            head = group[: data.draw(st.integers(1, len(group)))]
            self.pool.retain(head)
            self.tables.append(list(head))

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if self.fenced:
            held = self.fenced.pop(data.draw(st.integers(0, len(self.fenced) - 1)))
            self.pool.settle(held)
            self.freed(held)

    @rule(data=st.data())
    def misuse_raises(self, data: st.DataObject) -> None:
        block_id = data.draw(st.integers(0, self.pool.num_blocks - 1))
        if not any(block_id in table for table in self.tables):
            with pytest.raises(ValueError, match="with a reference"):
                self.pool.release([block_id])
        if not any(block_id in held for held in self.fenced):
            with pytest.raises(ValueError, match="fenced"):
                self.pool.settle([block_id])
        if not self.held(block_id):
            with pytest.raises(ValueError, match="used or in flight"):
                self.pool.retain([block_id])

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        pool: Any = getattr(self, "pool", None)
        if pool is None:
            return
        assert check_pool(pool, self.tables, [b for held in self.fenced for b in held]) == []
        assert pool.free_ids() == self.free_order
        assert pool.num_reserved == self.reserved
        assert pool.num_used == len({b for table in self.tables for b in table})


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
