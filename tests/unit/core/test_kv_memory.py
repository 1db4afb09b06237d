"""The tiers and the copies between them: what is kept, found, shared, distrusted and forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_svc.blocks.pool import BlockPool
from scheduler_svc.core.copies import Copies
from scheduler_svc.core.memory import KvMemory
from scheduler_svc.core.params import ExecutorLimits, HostCache
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.sequence import Sequence
from tests.unit.core.kv_samples import EXECUTOR, allocate, computed, copy, limits, started

# Copies


def test_a_copy_holds_both_blocks_and_gives_the_key_when_it_is_reported() -> None:
    device, host = BlockPool(4), BlockPool(4)
    copies = Copies(device, host)
    src, dst = allocate(device, 1), allocate(host, 1)
    copies.swap_out(src[0], dst[0], b"k" * 32)
    device.release(src)
    host.release(dst)
    assert (device.num_used, host.num_used) == (1, 1)
    assert copies.num_leaving() == 1
    plan = StepPlan(7)
    copies.write(plan)
    assert (plan.swap_out_src, plan.swap_out_dst) == (src, dst)
    assert host.lookup(b"k" * 32) is None
    assert not copies.finished(6)
    assert copies.finished(7)
    assert not copies.finished(7), "once"
    assert host.lookup(b"k" * 32) == dst[0]
    assert (device.num_used, host.num_used, host.num_cached) == (0, 0, 1)
    assert copies.is_idle


def test_a_distrusted_key_is_not_given_when_its_copy_is_reported() -> None:
    memory = KvMemory(limits())
    assert memory.host is not None
    seq = computed(memory)
    stash = memory.stash(seq)
    assert stash is not None
    memory.copies.write(StepPlan(1))
    memory.distrust(seq.prefix.keys[:1])
    memory.copies.finished(1)
    assert memory.device.key_of(0) is None
    assert memory.host.num_used == 2, "the stash"
    assert [memory.host.key_of(host_id) is None for host_id in stash.host_ids] == [True, False]


def test_a_flush_forgets_what_is_on_its_way_too() -> None:
    memory = KvMemory(limits())
    assert memory.host is not None
    seq = computed(memory)
    assert memory.stash(seq) is not None
    memory.copies.write(StepPlan(1))
    assert memory.flush() == 2
    memory.copies.finished(1)
    assert [memory.host.key_of(host_id) for host_id in range(8)] == [None] * 8


def test_a_block_that_others_hold_too_is_not_leaving() -> None:
    device, host = BlockPool(4), BlockPool(4)
    copies = Copies(device, host)
    copies.swap_out(allocate(device, 1)[0], allocate(host, 1)[0], None)
    assert copies.num_leaving() == 0
    device.release([0])
    assert copies.num_leaving() == 1


# Tiers


def test_a_stash_shares_what_the_host_tier_has_and_copies_the_rest() -> None:
    memory = KvMemory(limits())
    assert memory.host is not None
    seq = computed(memory, 9)
    seq.num_planned = 0
    assert memory.stash(seq) is None, "nothing is planned"
    seq.num_planned = 9
    first = memory.stash(seq)
    assert first is not None
    assert (first.num_copied, first.num_positions) == (3, 9)
    copy(memory, 1)
    second = memory.stash(seq)
    assert second is not None
    assert second.num_copied == 1, "the block that is not full has no key"
    assert second.host_ids[:2] == first.host_ids[:2]
    memory.drop_stash(first)
    memory.drop_stash(second)
    copy(memory, 2)
    assert (memory.host.num_used, memory.host.num_cached) == (0, 2)


def test_a_stash_that_needs_no_copy_is_done_at_once() -> None:
    memory = KvMemory(limits())
    seq = computed(memory)
    assert memory.stash(seq) is not None
    copy(memory, 1)
    again = memory.stash(seq)
    assert again is not None
    assert (again.num_copied, again.transfer.is_done) == (0, True)


def test_no_stash_where_the_host_tier_is_full() -> None:
    memory = KvMemory(limits(replace(EXECUTOR, num_host_blocks=2)))
    assert memory.host is not None
    seq = computed(memory, 9)
    assert memory.stash(seq) is None
    assert (memory.host.num_used, memory.device.num_used) == (0, 3)
    assert memory.copies.is_idle


@pytest.mark.parametrize(("policy", "num_kept"), [("on-evict", 2), ("write-through", 0), ("off", 0)])
def test_what_is_evicted_moves_to_the_host_tier_as_far_as_a_step_has_time(policy: str, num_kept: int) -> None:
    # A step of 160 tokens takes 1.6 s, 5 % of it are 80 ms, and a block takes 4 ms of the executor's time to copy.
    memory = KvMemory(limits(host_cache=HostCache(policy)))
    computed(memory)
    if policy == "write-through":
        assert len(memory.copies.queued.swap_outs) == 2
        copy(memory, 1)
    memory.device.release([0, 1])
    assert memory.allocate(16) is not None
    assert len(memory.copies.queued.swap_outs) == num_kept


def test_what_does_not_pay_is_neither_kept_nor_looked_for() -> None:
    slow = replace(EXECUTOR, swap_in_bytes_per_s=1000.0 / 60)  # a block comes back in 60 s and is computed in 0.04
    memory = KvMemory(limits(slow))
    computed(memory)
    memory.device.release([0, 1])
    memory.allocate(16)
    assert memory.copies.is_idle


def test_distrusted_content_is_gone_from_both_tiers() -> None:
    memory = KvMemory(limits())
    assert memory.host is not None
    seq = computed(memory)
    assert memory.stash(seq) is not None
    copy(memory, 1)
    assert all(memory.host.lookup(key) is not None for key in seq.prefix.keys)
    memory.distrust(seq.prefix.keys)
    assert [pool.lookup(key) for pool in (memory.device, memory.host) for key in seq.prefix.keys] == [None] * 4


def test_a_flush_empties_both_tiers() -> None:
    memory = KvMemory(limits())
    assert memory.host is not None
    seq = computed(memory)
    assert memory.stash(seq) is not None
    copy(memory, 1)
    assert memory.flush() == 4


# What a plan has time for: with these rates 2 blocks
TWO = replace(EXECUTOR, swap_out_bytes_per_s=3e4)
NONE = replace(EXECUTOR, swap_out_bytes_per_s=1e3)


@pytest.mark.parametrize("executor", [TWO, NONE])
def test_evicted_blocks_that_a_plan_has_no_time_for_are_forgotten(executor: ExecutorLimits) -> None:
    memory = KvMemory(limits(executor))
    seq = computed(memory, 16)
    memory.device.release([0, 1, 2, 3])
    assert memory.allocate(16) is not None
    copy(memory, 1)
    assert memory.host is not None
    found = [key for key in seq.prefix.keys if memory.host.lookup(key) is not None]
    assert found == (seq.prefix.keys[2:] if executor is TWO else []), "the first two that were evicted: from the tail"
    assert (memory.host.num_used, memory.device.num_used) == (0, 16)


def test_what_the_host_tier_has_is_not_copied_again() -> None:
    memory = KvMemory(limits())
    computed(memory)
    memory.device.release([0, 1])
    first = allocate(memory.device, 14)
    assert len(memory.allocate(2) or []) == 2
    copy(memory, 1)
    memory.device.release(first)
    again = computed(memory)
    memory.device.release(again.table.block_ids if again.table else [])
    assert memory.allocate(14) is not None
    assert memory.copies.is_idle


def test_nothing_is_kept_where_the_host_tier_has_no_room() -> None:
    memory = KvMemory(limits(replace(EXECUTOR, num_host_blocks=1)))
    assert memory.host is not None
    allocate(memory.host, 1)
    computed(memory)
    memory.device.release([0, 1])
    assert memory.allocate(16) is not None
    assert memory.copies.is_idle


def test_what_is_kept_counts_for_the_salt_of_its_content_not_for_who_drove_it_out() -> None:
    memory = KvMemory(limits())
    assert memory.host is not None
    seq = started(1, list(range(8)), memory.allocate(2, owner=b"quiet") or [], cache_salt=b"quiet")
    memory.publish(seq, 8)
    memory.device.release([0, 1])
    assert memory.allocate(16, owner=b"flood") is not None
    copy(memory, 1)
    kept = [memory.host.lookup(key) for key in seq.prefix.keys]
    assert [memory.host.owner_of(host_id) for host_id in kept if host_id is not None] == [b"quiet"] * 2


def write_through(executor: ExecutorLimits = TWO, num_positions: int = 28) -> tuple[KvMemory, Sequence]:
    memory = KvMemory(limits(executor, host_cache=HostCache.WRITE_THROUGH))
    return memory, computed(memory, num_positions)


def test_write_through_copies_a_plan_s_worth_at_a_time_until_it_has_copied_everything() -> None:
    memory, seq = write_through()
    memory.catch_up()
    plans: list[StepPlan] = []
    while memory.copies.queued:
        plans.append(copy(memory, len(plans) + 1))
        memory.catch_up()
    assert [plan.swap_out_src for plan in plans] == [[0, 1], [2, 3], [4, 5], [6]]
    assert memory.host is not None
    assert all(memory.host.lookup(key) is not None for key in seq.prefix.keys)
    assert memory.num_behind == 0


def test_write_through_copies_one_block_a_plan_where_that_takes_longer_than_it_should() -> None:
    memory, _ = write_through(NONE, 8)
    assert len(copy(memory, 1).swap_out_src) == 1
    memory.catch_up()
    assert len(copy(memory, 2).swap_out_src) == 1


@pytest.mark.parametrize("rate", ["prefill_tokens_per_s", "swap_out_bytes_per_s"])
def test_write_through_copies_nothing_where_a_rate_is_unknown(rate: str) -> None:
    memory, _ = write_through(replace(TWO, **{rate: 0.0}))  # type: ignore[arg-type]
    memory.catch_up()
    assert memory.copies.is_idle
    assert memory.num_behind == 0


def test_write_through_copies_what_is_evicted_before_its_turn_while_there_is_time() -> None:
    memory, seq = write_through(num_positions=16)
    copy(memory, 1)
    memory.device.release([0, 1, 2, 3])
    assert memory.allocate(16) is not None
    assert memory.copies.queued.swap_outs == [(3, 2, seq.prefix.keys[3]), (2, 3, seq.prefix.keys[2])]
    assert memory.num_behind == 0


def test_write_through_goes_on_when_the_host_tier_has_room_again() -> None:
    memory, _ = write_through(replace(TWO, num_host_blocks=2))
    assert memory.host is not None
    copy(memory, 1)
    taken = allocate(memory.host, 2)
    memory.catch_up()
    assert not memory.copies.queued
    memory.host.release(taken)
    memory.catch_up()
    assert len(memory.copies.queued.swap_outs) == 2


def test_write_through_takes_no_block_that_is_promised() -> None:
    memory, _ = write_through(num_positions=16)
    copy(memory, 1)
    memory.device.release([0, 1, 2, 3])
    assert memory.device.reserve(15)
    memory.catch_up()
    assert memory.copies.queued.swap_outs[0][0] == 2
    assert len(memory.copies.queued.swap_outs) == 1, "of 16 blocks 15 are promised"


@pytest.mark.parametrize("how", ["flush", "distrust", "reprice"])
def test_what_is_forgotten_is_not_copied_later(how: str) -> None:
    memory, seq = write_through()
    if how == "flush":
        memory.flush()
    elif how == "distrust":
        memory.distrust(seq.prefix.keys[2:])
    else:
        memory.reprice(limits(replace(TWO, swap_in_bytes_per_s=1.0), host_cache=HostCache.WRITE_THROUGH))
    copy(memory, 1)
    memory.catch_up()
    assert not memory.copies.queued
    assert memory.num_behind == 0
