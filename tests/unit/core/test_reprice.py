"""New rates in the middle of a session: costs, and what is kept in and found in the host tier."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.costs import block_costs
from scheduler_svc.core.limits import combine
from scheduler_svc.core.memory import KvMemory
from scheduler_svc.core.pace import step_pace
from scheduler_svc.core.params import ExecutorLimits, HostCache, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence

FAST_COPIES = ExecutorLimits(
    block_size=4,
    num_device_blocks=8,
    max_rows=8,
    max_tokens=256,
    num_lanes=64,
    max_model_len=64,
    num_host_blocks=8,
    bytes_per_block=1000,
    swap_out_bytes_per_s=1e9,
    swap_in_bytes_per_s=1e9,
    prefill_tokens_per_s=100.0,
)
SLOW_COPIES = replace(FAST_COPIES, swap_in_bytes_per_s=1.0)


def test_a_scheduler_weighs_by_the_new_rates_and_nothing_else_changes() -> None:
    scheduler = Scheduler(SchedulerConfig())
    scheduler.update_rates(SLOW_COPIES)  # nobody is there
    scheduler.attach_executor(FAST_COPIES, 0.0)
    assert scheduler._running is not None
    before = scheduler._running.limits
    scheduler.update_rates(replace(SLOW_COPIES, num_device_blocks=99, max_rows=1))
    after = scheduler._running.limits
    assert after == replace(before, costs=block_costs(SLOW_COPIES), pace=step_pace(250, SLOW_COPIES))
    assert after.costs != before.costs
    assert scheduler.check_invariants() == []


@pytest.mark.parametrize("host_cache", HostCache)
def test_the_host_tier_is_used_while_copying_in_pays(host_cache: HostCache) -> None:
    config = SchedulerConfig(host_cache=host_cache)
    memory = KvMemory(combine(config, FAST_COPIES))
    seq = Sequence(SequenceSpec(SeqId(1), list(range(9)), 4), priority=0)
    assert memory.host is not None
    for key in [memory.prefix._key(seq, index) for index in range(2)]:
        (block_id,) = memory.host.allocate(1) or []
        memory.host.publish(block_id, key)
        memory.host.release([block_id])
    hits = []
    for limits in (FAST_COPIES, SLOW_COPIES, FAST_COPIES):
        memory.reprice(combine(config, limits))
        hits.append(len(memory.prefix.match(seq).host_ids))
    assert hits == ([0, 0, 0] if host_cache is HostCache.OFF else [2, 0, 2])
