"""The parts behind prefix cache, host tier and preemption by cost, one at a time."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from cache_svc.blocks.pool import BlockPool
from cache_svc.blocks.table import BlockTable
from scheduler_svc.core.copies import Copies
from scheduler_svc.core.costs import OVERLAP, BlockCosts, Forecast, TailLosses, block_costs
from scheduler_svc.core.limits import StepLimits, combine
from scheduler_svc.core.memory import KvMemory
from scheduler_svc.core.params import ExecutorLimits, HostCache, PreemptionMode, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.preemption import Action, Victim, choose_action, forecast_s
from scheduler_svc.core.prefix import MAX_NEW_KEYS, PrefixIndex
from scheduler_svc.core.reserve import OutputLengths, peak_blocks
from scheduler_svc.core.sequence import Sequence

EXECUTOR = ExecutorLimits(
    block_size=4,
    num_device_blocks=16,
    max_rows=8,
    max_tokens=160,
    num_lanes=24,
    max_model_len=64,
    num_host_blocks=8,
    bytes_per_block=1000,
    swap_out_bytes_per_s=1e5,
    swap_in_bytes_per_s=2e5,
    prefill_tokens_per_s=100.0,
    model_fingerprint="model",
    kv_dtype="bfloat16",
)


def limits(executor: ExecutorLimits = EXECUTOR, **settings: object) -> StepLimits:
    return combine(replace(SchedulerConfig(), **settings), executor)  # type: ignore[arg-type]


def started(number: int, prompt: list[int], block_ids: list[int], **fields: object) -> Sequence:
    spec = SequenceSpec(SeqId(number), prompt, 20, **fields)  # type: ignore[arg-type]
    seq = Sequence(spec, priority=0)
    table = BlockTable(4)
    table.extend(block_ids)
    seq.start(number, table, 0, 0, 0.0)
    return seq


def index(pool: BlockPool, host: BlockPool | None = None, *, is_on: bool = True) -> PrefixIndex:
    return PrefixIndex(pool, host, 4, ("model", "bfloat16"), is_on=is_on)


def allocate(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.allocate(count)
    assert block_ids is not None
    return block_ids


# Prefix


def test_only_full_blocks_match_and_the_last_token_never_does() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(8)), allocate(pool, 2))
    assert len(prefix.publish(first, 7)) == 1, "position 7 is not in"
    assert len(prefix.publish(first, 8)) == 1
    for length, num_blocks in ((4, 0), (5, 1), (8, 1), (9, 2), (30, 2)):
        other = Sequence(SequenceSpec(SeqId(2), list(range(length)), 5), priority=0)
        assert prefix.match(other).device_ids == [0, 1][:num_blocks], length


def test_a_match_stops_at_the_first_block_that_is_not_there() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(12)), allocate(pool, 3))
    prefix.publish(first, 12)
    pool.unpublish(1)
    other = Sequence(SequenceSpec(SeqId(2), list(range(13)), 5), priority=0)
    assert prefix.match(other).device_ids == [0]


@pytest.mark.parametrize("field", [{"cache_salt": b"b"}, {"adapter": "b"}, {"reads_prefix_cache": False}])
def test_another_tenant_or_adapter_finds_nothing_nor_does_who_does_not_read(field: dict[str, object]) -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    prefix.publish(started(1, list(range(8)), allocate(pool, 2)), 8)
    spec = SequenceSpec(SeqId(2), list(range(9)), 5)
    assert prefix.match(Sequence(spec, priority=0)).device_ids == [0, 1]
    assert prefix.match(Sequence(replace(spec, **field), priority=0)).device_ids == []  # type: ignore[arg-type]


def test_keys_made_for_one_model_do_not_serve_another() -> None:
    pool = BlockPool(8)
    seq = started(1, list(range(8)), allocate(pool, 2))
    index(pool).publish(seq, 8)
    keys = list(seq.prefix.keys)
    seq.prefix.num_published = 0
    other_pool = BlockPool(8)
    allocate(other_pool, 2)
    PrefixIndex(other_pool, None, 4, ("other model", "bfloat16"), is_on=True).publish(seq, 8)
    assert not set(keys) & set(seq.prefix.keys)


def test_keys_made_for_one_block_size_do_not_serve_another() -> None:
    seq = Sequence(SequenceSpec(SeqId(1), [1, 2, 3, 4, 5], 9), priority=0)
    PrefixIndex(BlockPool(8), None, 1, ("model", "bfloat16"), is_on=True).match(seq)
    pool = BlockPool(8)
    prefix = PrefixIndex(pool, None, 2, ("model", "bfloat16"), is_on=True)
    other = started(2, [1, 9, 9, 9], allocate(pool, 4))
    PrefixIndex(BlockPool(8), None, 1, ("model", "bfloat16"), is_on=True).match(other)
    prefix.publish(other, 2)
    assert prefix.match(seq).device_ids == [], "only its first token is the same"


def test_who_needs_what_another_is_computing_waits_until_it_is_there_or_the_other_leaves() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(12)), allocate(pool, 3))
    other = Sequence(SequenceSpec(SeqId(2), [*range(8), 99, 98], 5), priority=0)
    assert not prefix.match(other).should_wait
    prefix.expect(first, 8)
    assert not prefix.match(first).should_wait, "nobody waits for itself"
    assert prefix.match(other).should_wait
    assert prefix.must_wait(other)
    prefix.publish(first, 4)
    assert prefix.must_wait(other), "now for the second block"
    assert prefix.match(other).should_wait
    assert prefix.match(other).device_ids == [0]
    prefix.publish(first, 8)
    assert not prefix.must_wait(other)
    assert not prefix.match(other).should_wait
    assert prefix.match(other).device_ids == [0, 1]
    prefix.expect(first, 12)
    longer = Sequence(SequenceSpec(SeqId(3), list(range(14)), 5), priority=0)
    assert prefix.match(longer).should_wait
    prefix.leave(first)
    assert not prefix.match(longer).should_wait
    assert prefix.expected_by() == []


def test_a_very_long_match_is_looked_up_in_parts() -> None:
    num_blocks = 2 * MAX_NEW_KEYS + 10
    pool = BlockPool(num_blocks)
    prefix = index(pool)
    tokens = [number % 50_000 for number in range(4 * num_blocks)]
    prefix.publish(started(1, tokens, allocate(pool, num_blocks)), len(tokens))
    other = Sequence(SequenceSpec(SeqId(2), [*tokens, 1], 5), priority=0)
    lengths = []
    while True:
        match = prefix.match(other)
        lengths.append(len(match.device_ids))
        if not match.should_wait:
            break
    assert lengths == [MAX_NEW_KEYS, 2 * MAX_NEW_KEYS, num_blocks]


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
    seq = started(1, list(range(8)), allocate(memory.device, 2))
    seq.num_planned = 8
    memory.publish(seq, 8)
    stash = memory.stash(seq)
    assert stash is not None
    plan = StepPlan(1)
    memory.copies.write(plan)
    memory.distrust(seq.prefix.keys[:1])
    memory.copies.finished(1)
    assert memory.device.key_of(0) is None
    assert memory.host.num_used == 2, "the stash"
    assert [memory.host.key_of(host_id) is None for host_id in stash.host_ids] == [True, False]


def test_a_flush_forgets_what_is_on_its_way_too() -> None:
    memory = KvMemory(limits())
    assert memory.host is not None
    seq = started(1, list(range(8)), allocate(memory.device, 2))
    seq.num_planned = 8
    memory.publish(seq, 8)
    assert memory.stash(seq) is not None
    memory.copies.write(StepPlan(1))
    assert memory.flush() == 2
    memory.copies.finished(1)
    assert [memory.host.key_of(host_id) for host_id in range(8)] == [None] * 8


# Tiers


def test_a_stash_shares_what_the_host_tier_has_and_copies_the_rest() -> None:
    memory = KvMemory(limits())
    assert memory.host is not None
    seq = started(1, list(range(9)), allocate(memory.device, 3))
    assert memory.stash(seq) is None, "nothing is planned"
    seq.num_planned = 9
    memory.publish(seq, 8)
    first = memory.stash(seq)
    assert first is not None
    assert (first.num_copied, first.num_positions) == (3, 9)
    memory.copies.write(StepPlan(1))
    memory.copies.finished(1)
    second = memory.stash(seq)
    assert second is not None
    assert second.num_copied == 1, "the block that is not full has no key"
    assert second.host_ids[:2] == first.host_ids[:2]
    memory.drop_stash(first)
    memory.drop_stash(second)
    memory.copies.write(StepPlan(2))
    memory.copies.finished(2)
    assert (memory.host.num_used, memory.host.num_cached) == (0, 2)


def test_a_stash_that_needs_no_copy_is_done_at_once() -> None:
    memory = KvMemory(limits())
    seq = started(1, list(range(9)), allocate(memory.device, 2))
    seq.num_planned = 8
    memory.publish(seq, 8)
    assert memory.stash(seq) is not None
    memory.copies.write(StepPlan(1))
    memory.copies.finished(1)
    again = memory.stash(seq)
    assert again is not None
    assert (again.num_copied, again.transfer.is_done) == (0, True)


def test_no_stash_where_the_host_tier_is_full() -> None:
    memory = KvMemory(limits(replace(EXECUTOR, num_host_blocks=2)))
    assert memory.host is not None
    seq = started(1, list(range(9)), allocate(memory.device, 3))
    seq.num_planned = 9
    memory.publish(seq, 8)
    assert memory.stash(seq) is None
    assert (memory.host.num_used, memory.device.num_used) == (0, 3)
    assert memory.copies.is_idle


@pytest.mark.parametrize(("policy", "num_kept"), [("on-evict", 2), ("write-through", 0), ("off", 0)])
def test_what_is_evicted_moves_to_the_host_tier_as_far_as_a_step_has_time(policy: str, num_kept: int) -> None:
    # A step of 160 tokens takes 1.6 s, 5 % of it are 80 ms, and a block takes 4 ms of the executor's time to copy.
    memory = KvMemory(limits(host_cache=HostCache(policy)))
    seq = started(1, list(range(8)), allocate(memory.device, 2))
    memory.publish(seq, 8)
    if policy == "write-through":
        assert len(memory.copies.queued.swap_outs) == 2
        memory.copies.write(StepPlan(1))
        memory.copies.finished(1)
    memory.device.release([0, 1])
    assert memory.allocate(16) is not None
    assert len(memory.copies.queued.swap_outs) == num_kept


def test_what_does_not_pay_is_neither_kept_nor_looked_for() -> None:
    slow = replace(EXECUTOR, swap_in_bytes_per_s=1000.0 / 60)  # a block comes back in 60 s and is computed in 0.04
    memory = KvMemory(limits(slow))
    seq = started(1, list(range(8)), allocate(memory.device, 2))
    memory.publish(seq, 8)
    memory.device.release([0, 1])
    memory.allocate(16)
    assert memory.copies.is_idle


# Costs


def test_costs_come_from_the_rates_and_what_is_unknown_is_never_chosen() -> None:
    costs = block_costs(EXECUTOR)
    assert costs == BlockCosts(recompute_s=0.04, swap_out_s=OVERLAP * 0.01, swap_in_s=OVERLAP * 0.005)
    unknown = replace(EXECUTOR, prefill_tokens_per_s=0.0, swap_in_bytes_per_s=0.0)
    forecast = forecast_s(limits(unknown), Victim(5, 5, 5), 5, 0.0)
    assert forecast == {Action.SWAP: inf, Action.RECOMPUTE: inf}
    assert choose_action(PreemptionMode.AUTO, forecast) is Action.RECOMPUTE


@pytest.mark.parametrize("rate", [0.0, -1.0, inf, nan])
def test_a_rate_that_is_none_is_unknown(rate: float) -> None:
    odd = replace(EXECUTOR, prefill_tokens_per_s=rate, swap_in_bytes_per_s=rate, swap_out_bytes_per_s=rate)
    assert block_costs(odd) == BlockCosts(inf, inf, inf)
    assert KvMemory(limits(odd)).host is not None
    assert block_costs(replace(EXECUTOR, bytes_per_block=0)).swap_out_s == inf


def test_the_cheapest_way_is_chosen_per_victim() -> None:
    cheap_copies = limits()
    dear_copies = limits(replace(EXECUTOR, swap_out_bytes_per_s=1e3, swap_in_bytes_per_s=1e3))
    whole = Victim(num_blocks=10, num_freed=10, num_to_copy=10)
    assert choose_action(PreemptionMode.AUTO, forecast_s(cheap_copies, whole, 10, 0.0)) is Action.SWAP
    assert choose_action(PreemptionMode.AUTO, forecast_s(dear_copies, whole, 10, 0.0)) is Action.RECOMPUTE
    assert choose_action(PreemptionMode.AUTO, forecast_s(dear_copies, whole, 2, 0.0)) is Action.TAIL
    forecast = forecast_s(dear_copies, whole, 2, 0.0)
    assert forecast[Action.TAIL] == pytest.approx(2 * 0.04 + 0.04)
    assert choose_action(PreemptionMode.SWAP, forecast) is Action.SWAP
    there_already = replace(whole, num_to_copy=0)
    dear_out = limits(replace(EXECUTOR, swap_out_bytes_per_s=1e3))
    assert choose_action(PreemptionMode.AUTO, forecast_s(dear_out, whole, 10, 0.0)) is Action.RECOMPUTE
    assert choose_action(PreemptionMode.AUTO, forecast_s(dear_out, there_already, 10, 0.0)) is Action.SWAP
    assert choose_action(PreemptionMode.RECOMPUTE, forecast_s(cheap_copies, whole, 10, 0.0)) is Action.RECOMPUTE


def test_what_a_tail_costs_is_learned_from_those_that_came_back() -> None:
    victim = Victim(num_blocks=10, num_freed=10, num_to_copy=10)
    losses = TailLosses()
    first = forecast_s(limits(), victim, 2, losses.share)[Action.TAIL]
    for _ in range(50):
        losses.resumed(100, 10)
        losses.resumed(0, 0)
    learned = forecast_s(limits(), victim, 2, losses.share)[Action.TAIL]
    assert first - learned == pytest.approx(8 * (OVERLAP * 0.015), rel=0.01), "10 blocks, then the 2 that are needed"


def test_without_a_prefix_cache_there_is_no_tail_to_come_back_to() -> None:
    forecast = forecast_s(limits(prefix_cache=False), Victim(10, 10, 10), 2, 0.0)
    assert set(forecast) == {Action.SWAP, Action.RECOMPUTE}


def test_regret_is_what_was_paid_beyond_the_cheapest_forecast() -> None:
    costs = BlockCosts(recompute_s=0.04, swap_out_s=0.01, swap_in_s=0.005)
    forecast = Forecast(best_s=0.1, spent_s=0.02, let_go=False)
    assert forecast.regret_s(costs, 0, 10) == 0.0
    assert forecast.regret_s(costs, 5, 0) == pytest.approx(0.12)
    assert forecast.regret_s(BlockCosts(inf, 0.01, 0.005), 1, 0) == 0.0


# Reserve


def test_without_experience_outputs_are_expected_to_be_as_long_as_they_may() -> None:
    assert OutputLengths().remaining(3, 100) == 97


def test_what_remains_is_learned_from_outputs_that_got_that_far() -> None:
    lengths = OutputLengths()
    for number in range(400):
        lengths.finished(20 if number % 2 else 200, at_limit=False)
    short, long = lengths.remaining(4, 1000), lengths.remaining(60, 1000)
    assert 90 < short < 190, "half end at 20, half at 200, and a little caution"
    assert 135 < long < 240, "who has 60 is one of the long ones"
    assert lengths.remaining(60, 80) <= 20
    for _ in range(400):
        lengths.finished(64, at_limit=True)
    assert lengths.remaining(4, 1000) > 900, "now almost all use up what they may"


def test_old_experience_fades_and_weights_do_not_overflow() -> None:
    lengths = OutputLengths()
    for _ in range(300):
        lengths.finished(1000, at_limit=False)
    for _ in range(6000):
        lengths.finished(10, at_limit=False)
    assert lengths.remaining(1, 5000) < 450


@pytest.mark.parametrize(
    ("sequences", "peak"),
    [
        ([], 0),
        ([(0.0, 3)], 3),
        ([(8.0, 3)], 5),
        ([(8.0, 3), (8.0, 3)], 10),
        ([(40.0, 1), (4.0, 9)], 12),  # both grow by one, then the second goes before the first is long
        ([(40.0, 9), (4.0, 1)], 19),
    ],
)
def test_the_peak_is_at_the_worst_moment_not_the_sum(sequences: list[tuple[float, int]], peak: int) -> None:
    assert peak_blocks(sequences, 4) == peak


# What the index and the tiers must not forget


def test_who_leaves_is_expected_no_more_and_only_by_itself() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(12)), allocate(pool, 3))
    second = started(2, list(range(12)), allocate(pool, 3))
    prefix.expect(first, 8)
    prefix.expect(second, 8)
    assert {seq.seq_id for seq in prefix.expected_by()} == {1}, "the first keeps what it announced"
    prefix.leave(second)
    assert {seq.seq_id for seq in prefix.expected_by()} == {1}
    prefix.leave(first)
    assert prefix.expected_by() == []
    assert (first.prefix.num_published, first.prefix.num_expected) == (0, 0)


def test_distrusted_content_is_gone_from_both_tiers() -> None:
    memory = KvMemory(limits())
    assert memory.host is not None
    seq = started(1, list(range(8)), allocate(memory.device, 2))
    seq.num_planned = 8
    memory.publish(seq, 8)
    assert memory.stash(seq) is not None
    memory.copies.write(StepPlan(1))
    memory.copies.finished(1)
    assert all(memory.host.lookup(key) is not None for key in seq.prefix.keys)
    memory.distrust(seq.prefix.keys)
    assert [pool.lookup(key) for pool in (memory.device, memory.host) for key in seq.prefix.keys] == [None] * 4


def test_a_flush_empties_both_tiers() -> None:
    memory = KvMemory(limits())
    assert memory.host is not None
    seq = started(1, list(range(8)), allocate(memory.device, 2))
    seq.num_planned = 8
    memory.publish(seq, 8)
    assert memory.stash(seq) is not None
    memory.copies.write(StepPlan(1))
    memory.copies.finished(1)
    assert memory.flush() == 4


def test_a_block_that_others_hold_too_is_not_leaving() -> None:
    device, host = BlockPool(4), BlockPool(4)
    copies = Copies(device, host)
    copies.swap_out(allocate(device, 1)[0], allocate(host, 1)[0], None)
    assert copies.num_leaving() == 0
    device.release([0])
    assert copies.num_leaving() == 1
