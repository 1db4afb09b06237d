"""Prefix cache, host tier and preemption as the scheduler's two verbs show them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core import admission, queued_hits
from scheduler_svc.core.events import FinishedEvent, FinishReason
from scheduler_svc.core.params import (
    ExecutorLimits,
    HostCache,
    PreemptionMode,
    QueuePolicy,
    SchedulerConfig,
    SeqId,
    SequenceSpec,
)
from scheduler_svc.core.plan import NO_TOKEN, RowErrorCode, StepPlan, StepResult, StepStatus
from scheduler_svc.core.preemption import Action, Reason
from scheduler_svc.core.queued_hits import MAX_BLOCKS_PER_PLAN, MAX_KEYS_AT_SUBMIT
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceState

CONFIG = SchedulerConfig(
    max_num_batched_tokens=32, max_num_seqs=4, max_prefill_chunk=16, pipeline_depth=1, growth_reserve=0.0
)
EXECUTOR = ExecutorLimits(
    block_size=4,
    num_device_blocks=12,
    max_rows=8,
    max_tokens=32,
    num_lanes=24,
    max_model_len=64,
    num_host_blocks=16,
    bytes_per_block=1000,
    swap_out_bytes_per_s=1e6,
    swap_in_bytes_per_s=1e6,
    prefill_tokens_per_s=100.0,
)


def attached(executor: ExecutorLimits = EXECUTOR, **settings: object) -> Scheduler:
    scheduler = Scheduler(replace(CONFIG, **settings))  # type: ignore[arg-type]
    scheduler.attach_executor(executor, 0.0)
    return scheduler


def submit(scheduler: Scheduler, number: int, prompt: list[int], max_tokens: int = 4, **fields: object) -> None:
    spec = SequenceSpec(SeqId(number), prompt, max_tokens, **fields)  # type: ignore[arg-type]
    assert scheduler.submit(spec, 0.0) is None


def step(scheduler: Scheduler, now: float = 0.0, **fields: object) -> tuple[StepPlan, list[FinishedEvent]]:
    """One plan and a result for it in which every row samples that can; copies are reported at once."""
    plan = scheduler.schedule(now)
    assert plan is not None
    running = scheduler._running
    assert running is not None
    record = running.inflight[-1]
    tokens = [NO_TOKEN if row in record.silent else 7 for row in range(len(record.rows))]
    copied = (plan.step_id,) if plan.swap_out_src or plan.swap_in_src else ()
    result = replace(StepResult(plan.step_id, tokens, finished_copy_steps=copied), **fields)  # type: ignore[arg-type]
    events = scheduler.apply(result, now)
    assert scheduler.check_invariants() == []
    return plan, [event for event in events if isinstance(event, FinishedEvent)]


def finish(scheduler: Scheduler) -> dict[int, FinishedEvent]:
    ends: dict[int, FinishedEvent] = {}
    for _ in range(200):
        if scheduler.stats().running + scheduler.stats().queue_requests == 0:
            return ends
        ends |= {event.seq_id: event for event in step(scheduler)[1]}
    raise AssertionError(scheduler.stats())


def test_the_bill_says_what_was_cached_and_what_was_computed() -> None:
    scheduler = attached()
    submit(scheduler, 1, list(range(20)), 1)
    submit(scheduler, 2, list(range(20)), 1)
    ends = finish(scheduler)
    assert [(end.num_computed_tokens, end.num_cached_tokens) for end in ends.values()] == [(20, 0), (4, 16)]
    stats = scheduler.stats()
    assert (stats.prefill_tokens_total, stats.cached_tokens_total) == (24, 16)
    assert (stats.prefix_hit_tokens_total, stats.prefix_query_tokens_total) == (16, 40)


def test_blocks_of_a_sequence_with_a_row_error_are_found_by_nobody() -> None:
    scheduler = attached()
    submit(scheduler, 1, list(range(20)), 4)
    step(scheduler)
    assert scheduler.stats().blocks_cached == 0
    _, ends = step(
        scheduler, token_ids=[NO_TOKEN], status=StepStatus.ROW_ERRORS, row_errors={0: RowErrorCode.NUMERICAL}
    )
    assert [end.reason for end in ends] == [FinishReason.NUMERICAL]
    submit(scheduler, 2, list(range(20)), 1)
    assert finish(scheduler)[2].num_cached_tokens == 0


def test_evicted_blocks_come_back_from_the_host_tier() -> None:
    scheduler = attached(replace(EXECUTOR, prefill_tokens_per_s=1.0))
    submit(scheduler, 1, list(range(20)), 1)
    finish(scheduler)
    submit(scheduler, 2, list(range(100, 145)), 1)
    finish(scheduler)
    assert scheduler.stats().host_blocks_cached > 0
    submit(scheduler, 3, list(range(20)), 1)
    plan, _ = step(scheduler)
    assert plan.swap_in_src
    assert plan.num_rows == 0, "its row comes with the next plan, when the copies have had a step's time"
    plan, ends = step(scheduler)
    assert plan.num_rows == 1
    assert ends[0].num_cached_tokens == 16
    assert scheduler.stats().swapped_tokens_total >= 4


def test_an_executor_with_larger_blocks_finds_no_prefix_by_keys_of_the_smaller_ones() -> None:
    scheduler = attached(replace(EXECUTOR, block_size=1), max_num_seqs=1)
    submit(scheduler, 1, [5, 6, 6], 1)
    submit(scheduler, 2, [5, 7, 7], 1)  # while they wait, both get a key for their first token, which is the same
    scheduler.attach_executor(replace(EXECUTOR, block_size=2), 0.0)
    assert {seq_id: end.num_cached_tokens for seq_id, end in finish(scheduler).items()} == {1: 0, 2: 0}


def test_an_executor_that_is_lost_takes_both_tiers_with_it() -> None:
    scheduler = attached()
    submit(scheduler, 1, list(range(20)), 9)
    submit(scheduler, 2, list(range(50, 60)), 9)
    step(scheduler)
    step(scheduler)
    assert scheduler.preempt(SeqId(1), Action.SWAP)
    step(scheduler)
    assert scheduler.stats().swapped == 1
    scheduler.attach_executor(EXECUTOR, 0.0)
    assert scheduler.check_invariants() == []
    stats = scheduler.stats()
    assert (stats.swapped, stats.host_blocks_used, stats.blocks_cached) == (0, 0, 0)
    plan, _ = step(scheduler)
    assert [admit.num_cached_tokens for admit in plan.admit] == [0, 0]
    assert {end.reason for end in finish(scheduler).values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("mode", "action", "executor"),
    [
        (PreemptionMode.AUTO, Action.SWAP, EXECUTOR),
        (PreemptionMode.AUTO, Action.TAIL, replace(EXECUTOR, swap_in_bytes_per_s=1e3, swap_out_bytes_per_s=1e3)),
        (PreemptionMode.RECOMPUTE, Action.TAIL, EXECUTOR),
        (PreemptionMode.SWAP, Action.SWAP, replace(EXECUTOR, swap_in_bytes_per_s=1e3)),
        (PreemptionMode.SWAP, Action.RECOMPUTE, replace(EXECUTOR, num_host_blocks=0)),
    ],
)
def test_preemption_is_counted_by_what_was_done_and_why(
    mode: PreemptionMode, action: Action, executor: ExecutorLimits
) -> None:
    scheduler = attached(executor, preemption_mode=mode, host_cache=HostCache.OFF)
    submit(scheduler, 1, list(range(20)), 20)
    submit(scheduler, 2, list(range(50, 68)), 20)
    finish(scheduler)
    counted = scheduler.stats().preemptions_total
    assert set(counted) == {(action, Reason.MEMORY)}
    submit(scheduler, 3, list(range(200, 230)), 9)
    step(scheduler)
    submit(scheduler, 4, list(range(300, 330)), 2, priority=1)
    step(scheduler)
    assert sum(count for (_, reason), count in scheduler.stats().preemptions_total.items() if reason is Reason.PRIORITY)


def test_a_swapped_sequence_computes_nothing_again_and_regrets_little() -> None:
    scheduler = attached(preemption_mode=PreemptionMode.SWAP)
    submit(scheduler, 1, list(range(20)), 20)
    submit(scheduler, 2, list(range(50, 68)), 20)
    finish(scheduler)
    stats = scheduler.stats()
    assert stats.num_preemptions_total > 0
    assert stats.recomputed_tokens_total == 0
    assert stats.swapped_in_blocks_total > 0
    assert stats.preemption_forecast_s_total > 0
    assert stats.preemption_regret_s_total <= stats.preemption_forecast_s_total * 0.5


def test_residency_is_sampled_over_the_clock_of_the_verbs() -> None:
    scheduler = attached(replace(EXECUTOR, num_host_blocks=0))
    for number in range(1, 60):
        submit(scheduler, number, list(range(number * 100, number * 100 + 41)), 1)
        for tick in range(4):
            if scheduler.stats().running + scheduler.stats().queue_requests:
                step(scheduler, now=number + tick * 0.1)
    residency = scheduler.residency
    assert residency.lifetime.count > 10
    assert 0.5 < residency.lifetime.sum / residency.lifetime.count < 5.0


def test_flushing_forgets_what_is_kept_and_nothing_else() -> None:
    scheduler = attached()
    submit(scheduler, 1, list(range(20)), 6)
    step(scheduler)
    step(scheduler)
    submit(scheduler, 2, list(range(40, 50)), 1)
    step(scheduler)
    assert scheduler.flush_prefix_cache() > 0
    assert scheduler.check_invariants() == []
    assert scheduler.stats().blocks_cached == 0
    submit(scheduler, 3, list(range(20)), 1)
    assert finish(scheduler)[1].reason is FinishReason.LENGTH


def test_the_queue_orders_by_what_is_left_to_compute() -> None:
    scheduler = attached(max_num_seqs=1)
    submit(scheduler, 1, list(range(40)), 1)
    finish(scheduler)
    submit(scheduler, 2, list(range(100, 120)), 1)
    submit(scheduler, 3, [*range(36), 99, 98], 1)
    plan, _ = step(scheduler, now=1.0)
    assert [len(admit.token_ids) for admit in plan.admit] == [38], "2 of its 38 tokens are left, not 20 of 20"


@pytest.mark.parametrize("policy", QueuePolicy)
def test_the_queue_orders_by_a_long_cached_prefix_too_though_it_is_looked_up_in_parts(policy: QueuePolicy) -> None:
    num_blocks = MAX_KEYS_AT_SUBMIT + MAX_BLOCKS_PER_PLAN + 100
    executor = replace(EXECUTOR, num_device_blocks=2 * num_blocks, max_model_len=8 * num_blocks, max_tokens=8192)
    scheduler = attached(
        executor, max_num_seqs=1, max_num_batched_tokens=8192, max_prefill_chunk=8192, queue_policy=policy
    )
    long = [number % 5000 for number in range(4 * num_blocks)]
    submit(scheduler, 1, long, 1)
    finish(scheduler)
    submit(scheduler, 2, list(range(6000, 6020)), 4)
    step(scheduler)  # it runs, so the others wait
    submit(scheduler, 3, list(range(7000, 7200)), 1)
    submit(scheduler, 4, [*long, 1, 2], 1)
    hits = []
    for _ in range(3):
        hits.append(4 * num_blocks + 2 + 200 - scheduler.stats().queue_tokens)
        step(scheduler)
    assert hits == [4 * MAX_KEYS_AT_SUBMIT, 4 * (MAX_KEYS_AT_SUBMIT + MAX_BLOCKS_PER_PLAN), 4 * num_blocks]
    order = list(finish(scheduler))
    assert order == ([4, 3] if policy is QueuePolicy.LENGTH_AWARE else [3, 4]), "2 tokens against 200"


def test_one_plan_looks_up_only_so_much_and_nobody_who_has_left_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_hits, "MAX_KEYS_AT_SUBMIT", 1)
    monkeypatch.setattr(queued_hits, "MAX_BLOCKS_PER_PLAN", 2)
    scheduler = attached(max_num_seqs=1, queue_policy=QueuePolicy.LENGTH_AWARE)
    submit(scheduler, 1, list(range(32)), 1)
    finish(scheduler)
    for number in (2, 3, 4):
        submit(scheduler, number, [*range(32), 50 + number], 4)
    assert scheduler.stats().queue_tokens == 3 * (33 - 4)
    step(scheduler)  # 2 blocks more of the first, which then starts
    assert scheduler.stats().queue_tokens == 2 * (33 - 4)
    step(scheduler)
    assert scheduler.stats().queue_tokens == (33 - 12) + (33 - 4)
    assert len(finish(scheduler)) == 3
    for number in (5, 6, 7):
        submit(scheduler, number, [*range(12), 50 + number], 4)
    step(scheduler)  # the first is done with, and starts
    assert scheduler.stats().queue_tokens == 2 * (13 - 4)


def test_who_waits_for_a_prefix_holds_up_nobody() -> None:
    scheduler = attached(replace(EXECUTOR, num_device_blocks=400, max_model_len=800), max_num_seqs=64, max_skip_ahead=0)
    for number in range(1, 101):
        submit(scheduler, number, [*range(600), 1000 + number], 1)
    submit(scheduler, 200, list(range(2000, 2010)), 1)
    first, _ = step(scheduler)
    assert sorted(len(admit.token_ids) for admit in first.admit) == [10, 601]
    ends = finish(scheduler)
    assert len(ends) == 100
    assert sum(end.num_computed_tokens for end in ends.values()) == 601 + 99, "600 tokens once, one for each other"


def test_room_is_made_only_for_one_that_can_then_start() -> None:
    scheduler = attached(growth_reserve=1.0)
    submit(scheduler, 1, list(range(100, 116)), 24, priority=1)  # will need 10 of 12 blocks
    step(scheduler)
    submit(scheduler, 2, list(range(200, 204)), 4)
    step(scheduler)
    assert scheduler.stats().running == 2
    submit(scheduler, 3, list(range(300, 316)), 20, priority=1)
    for _ in range(5):
        step(scheduler)
        assert scheduler.stats().num_preemptions_total == 0, "it has to wait for 1, and then 2 can go on"


@pytest.mark.parametrize("action", [Action.RECOMPUTE, Action.SWAP])
def test_a_row_that_fails_after_its_sequence_made_room_takes_its_keys_with_it(action: Action) -> None:
    scheduler = attached(pipeline_depth=2)
    submit(scheduler, 1, list(range(40)), 4)
    step(scheduler)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert scheduler.preempt(SeqId(1), action)
    errors = {0: RowErrorCode.NUMERICAL}
    scheduler.apply(StepResult(plan.step_id, [NO_TOKEN], None, StepStatus.ROW_ERRORS, errors), 0.0)
    assert scheduler.check_invariants() == []
    submit(scheduler, 2, list(range(40)), 1)
    assert finish(scheduler)[2].num_cached_tokens == 0


def test_a_limit_on_queued_tokens_counts_cached_ones() -> None:
    scheduler = attached(max_queue_tokens=100, max_num_seqs=1)
    submit(scheduler, 1, list(range(32)), 1)
    finish(scheduler)
    for number in range(2, 5):
        submit(scheduler, number, list(range(33)), 9)
    refusal = scheduler.submit(SequenceSpec(SeqId(9), list(range(33)), 9), 0.0)
    assert refusal is not None
    assert "99 prompt tokens" in refusal.message


def test_unknown_rates_leave_the_seconds_finite() -> None:
    scheduler = attached(replace(EXECUTOR, prefill_tokens_per_s=0.0, swap_in_bytes_per_s=0.0))
    submit(scheduler, 1, list(range(20)), 20)
    submit(scheduler, 2, list(range(50, 68)), 20)
    finish(scheduler)
    stats = scheduler.stats()
    assert stats.num_preemptions_total > 0
    assert (stats.preemption_forecast_s_total, stats.preemption_regret_s_total) == (0.0, 0.0)


def test_one_plan_admits_no_more_tokens_than_a_message_should_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_TOKENS_SENT", 30)
    scheduler = attached()
    submit(scheduler, 1, list(range(20)), 1)
    finish(scheduler)
    for number in range(2, 6):
        submit(scheduler, number, list(range(20)), 1)
    plans = [step(scheduler)[0] for _ in range(2)]
    assert [len(plan.admit) for plan in plans] == [2, 2], "20 tokens are below the limit, 40 are not"


def test_blocks_of_a_finished_output_are_found_by_the_next_turn() -> None:
    scheduler = attached()
    submit(scheduler, 1, list(range(10)), 7)
    assert finish(scheduler)[1].num_output_tokens == 7
    submit(scheduler, 2, [*range(10), *[7] * 7, 50], 1)
    assert finish(scheduler)[2].num_cached_tokens == 16, "10 of the prompt and 6 that the output computed"


def test_a_victim_of_priority_frees_what_it_reserved_too() -> None:
    scheduler = attached(replace(EXECUTOR, num_device_blocks=10, num_host_blocks=0), prefix_cache=False)
    submit(scheduler, 1, list(range(8)), 24)
    for _ in range(2):
        step(scheduler)
        seq = scheduler._sequences[SeqId(1)]
        assert scheduler._session is not None
        scheduler._session.preempter.preempt(seq, 1, Reason.MEMORY)
    step(scheduler)
    assert scheduler.stats().blocks_reserved > 0, "twice preempted, it starts with all it may ever need"
    submit(scheduler, 2, list(range(100, 120)), 2, priority=1)
    step(scheduler)
    assert scheduler.stats().preemptions_total.get((Action.RECOMPUTE, Reason.PRIORITY), 0) == 0, "immune"


def test_a_block_that_an_output_fills_is_found_while_its_sequence_still_runs() -> None:
    scheduler = attached()
    submit(scheduler, 1, [1, 2, 3, 4], 20)
    for _ in range(6):
        step(scheduler)
    submit(scheduler, 2, [1, 2, 3, 4, 7, 7, 7, 7, 50], 1)
    _, ends = step(scheduler)
    assert [(end.seq_id, end.num_cached_tokens) for end in ends] == [(2, 8)]
    assert scheduler.stats().running == 1


def test_who_comes_between_two_chunks_waits_for_the_next_one() -> None:
    scheduler = attached(max_prefill_chunk=8)
    submit(scheduler, 1, list(range(32)), 1)
    step(scheduler)
    submit(scheduler, 2, list(range(33)), 1, priority=1)  # so it has its turn before the next chunk is planned
    assert finish(scheduler)[2].num_cached_tokens == 32
    assert scheduler.stats().prefill_tokens_total == 33


def test_write_through_copies_everything_in_the_end_when_nobody_asks_for_more() -> None:
    scheduler = attached(replace(EXECUTOR, swap_out_bytes_per_s=1e5), host_cache=HostCache.WRITE_THROUGH)
    submit(scheduler, 1, list(range(40)), 1)
    finish(scheduler)
    num_plans = 0
    while scheduler.stats().host_blocks_cached < 10:
        plan, _ = step(scheduler)
        assert (len(plan.swap_out_src), plan.num_rows) == (1, 0)
        num_plans += 1
    assert num_plans > 5
    assert scheduler.schedule(0.0) is None
    assert scheduler.stats().blocks_cached == 10


@pytest.mark.parametrize(("share", "num_cached"), [(0.5, 16), (1.0, 0)])
@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_one_salt_does_not_evict_what_another_keeps(share: float, num_cached: int, num_host_blocks: int) -> None:
    executor = replace(EXECUTOR, num_host_blocks=num_host_blocks, prefill_tokens_per_s=1.0)
    scheduler = attached(executor, prefix_cache_share=share)
    submit(scheduler, 1, list(range(20)), 1, cache_salt=b"quiet")
    finish(scheduler)
    for number in range(2, 12):
        submit(scheduler, number, list(range(number * 100, number * 100 + 20)), 1, cache_salt=b"flood")
        finish(scheduler)
    submit(scheduler, 99, list(range(20)), 1, cache_salt=b"quiet")
    assert finish(scheduler)[99].num_cached_tokens == num_cached
    assert (scheduler.stats().share_evictions_total > 0) == (share < 1.0)


def test_the_host_tier_has_shares_of_its_own() -> None:
    scheduler = attached(replace(EXECUTOR, num_host_blocks=40, prefill_tokens_per_s=1.0), prefix_cache_share=0.5)
    submit(scheduler, 1, list(range(16)), 1, cache_salt=b"quiet")
    finish(scheduler)
    submit(scheduler, 2, list(range(100, 147)), 1, cache_salt=b"quiet")  # drives the first to the host tier
    finish(scheduler)
    assert scheduler.stats().host_blocks_cached == 4
    for number in range(3, 12):
        submit(scheduler, number, list(range(number * 100, number * 100 + 40)), 1, cache_salt=b"flood")
        finish(scheduler)
    assert scheduler.stats().host_share_evictions_total > 0
    submit(scheduler, 99, list(range(17)), 1, cache_salt=b"quiet")
    assert finish(scheduler)[99].num_cached_tokens == 16


@pytest.mark.parametrize("mode", PreemptionMode)
def test_whatever_a_sequence_gets_counts_for_its_salt(mode: PreemptionMode) -> None:
    scheduler = attached(preemption_mode=mode)
    submit(scheduler, 1, list(range(7)), 24, cache_salt=b"mine")
    for num_steps in (4, 1):
        for _ in range(num_steps):
            step(scheduler)  # which checks the books
        while scheduler._sequences[SeqId(1)].state is not SequenceState.RUNNING:
            step(scheduler)
        assert scheduler._session is not None
        scheduler._session.preempter.preempt(scheduler._sequences[SeqId(1)], 1, Reason.MEMORY)
        assert scheduler.check_invariants() == []
    assert finish(scheduler)[1].num_preemptions == 2, "from then on it grows by what is promised to it"
