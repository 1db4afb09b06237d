"""What the scheduler promises to its caller, one property a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.events import Event, FinishedEvent, FinishReason, RefusalReason, TokensEvent
from scheduler_svc.core.params import ExecutorLimits, QueuePolicy, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import NO_TOKEN, RowErrorCode, StepPlan, StepResult, StepStatus
from scheduler_svc.core.results import ResultMismatchError
from scheduler_svc.core.scheduler import MAX_FAILED_STEPS, Scheduler

CONFIG = SchedulerConfig(
    max_num_batched_tokens=32,
    max_num_seqs=4,
    max_prefill_chunk=16,
    pipeline_depth=1,
    prefix_cache=False,  # prompts here are all alike
    growth_reserve=0.0,
)
EXECUTOR = ExecutorLimits(4, 16, max_rows=8, max_tokens=32, num_lanes=24, max_model_len=64)


def attached(executor: ExecutorLimits = EXECUTOR, **settings: object) -> Scheduler:
    scheduler = Scheduler(replace(CONFIG, **settings))  # type: ignore[arg-type]
    scheduler.attach_executor(executor, 0.0)
    return scheduler


def spec(number: int, prompt: int = 4, max_tokens: int = 5, **fields: object) -> SequenceSpec:
    return SequenceSpec(SeqId(number), [1] * prompt, max_tokens, **fields)  # type: ignore[arg-type]


def must_schedule(scheduler: Scheduler, now: float = 0.0) -> StepPlan:
    plan = scheduler.schedule(now)
    assert plan is not None
    assert scheduler.check_invariants() == []
    return plan


def answer(scheduler: Scheduler, plan: StepPlan, *tokens: int, now: float = 0.0) -> list[Event]:
    events = scheduler.apply(StepResult(plan.step_id, list(tokens)), now)
    assert scheduler.check_invariants() == []
    return events


def ends(events: list[Event]) -> dict[int, FinishReason]:
    return {int(event.seq_id): event.reason for event in events if isinstance(event, FinishedEvent)}


def test_nothing_is_planned_without_an_executor_but_sequences_queue() -> None:
    scheduler = Scheduler(CONFIG)
    assert scheduler.submit(spec(1, prompt=10_000), 0.0) is None
    assert scheduler.schedule(0.0) is None
    assert scheduler.stats().queue_requests == 1
    assert ends(scheduler.attach_executor(EXECUTOR, 1.0)) == {1: FinishReason.NO_FIT}
    assert scheduler.stats().queue_requests == 0


def test_a_prompt_queued_before_the_executor_gets_the_refusal_of_one_that_comes_after_it() -> None:
    executor = replace(EXECUTOR, num_device_blocks=4)
    early, late = Scheduler(CONFIG), attached(executor)
    prompts = (15, 16, 63, 64)
    for prompt in prompts:
        assert early.submit(spec(prompt, prompt=prompt), 0.0) is None
    events = early.attach_executor(executor, 1.0)
    refusals = {int(event.seq_id): event.refusal for event in events if isinstance(event, FinishedEvent)}
    assert refusals == {prompt: late.submit(spec(prompt, prompt=prompt), 0.0) for prompt in prompts[1:]}
    reasons = [refusal and refusal.reason for refusal in refusals.values()]
    kv = RefusalReason.PROMPT_EXCEEDS_KV_CAPACITY
    assert reasons == [kv, kv, RefusalReason.CONTEXT_LENGTH]


def test_output_that_outgrows_a_smaller_executor_is_not_blamed_on_the_prompt() -> None:
    scheduler = attached()
    assert scheduler.submit(spec(1, prompt=15, emitted_ids=[5, 6], max_tokens=9), 0.0) is None
    (end,) = scheduler.attach_executor(replace(EXECUTOR, num_device_blocks=4), 1.0)
    assert isinstance(end, FinishedEvent)
    assert (end.reason, end.refusal) == (FinishReason.NO_FIT, None)


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers_and_leaves_nothing() -> None:
    scheduler = attached(replace(EXECUTOR, num_device_blocks=4))
    refusal = scheduler.submit(spec(1, prompt=16), 0.0)
    assert refusal is not None
    assert refusal.reason is RefusalReason.PROMPT_EXCEEDS_KV_CAPACITY
    assert all(number in refusal.message for number in ("16", "5 blocks", "has 4"))
    refusal = scheduler.submit(spec(1, prompt=64), 0.0)
    assert refusal is not None
    assert refusal.reason is RefusalReason.CONTEXT_LENGTH
    assert scheduler.submit(spec(1, prompt=15), 0.0) is None
    assert scheduler.stats().queue_requests == 1


@pytest.mark.parametrize("bad", [spec(1, prompt=0), spec(1, max_tokens=0), spec(7)])
def test_a_spec_that_should_not_have_come_is_an_error(bad: SequenceSpec) -> None:
    scheduler = attached()
    assert scheduler.submit(spec(7), 0.0) is None
    with pytest.raises(ValueError, match="Got"):
        scheduler.submit(bad, 0.0)
    assert scheduler.check_invariants() == []


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    scheduler = attached(max_queue_requests=2, max_queue_tokens=10, max_num_seqs=1)
    assert scheduler.submit(spec(1, prompt=6), 0.0) is None
    refusal = scheduler.submit(spec(2, prompt=5), 0.0)
    assert refusal is not None
    assert (refusal.reason, "10" in refusal.message) == (RefusalReason.QUEUE_FULL, True)
    assert scheduler.submit(spec(3, prompt=4), 0.0) is None
    refusal = scheduler.submit(spec(4, prompt=1), 0.0)
    assert refusal is not None
    assert refusal.reason is RefusalReason.QUEUE_FULL


def test_a_resubmission_has_room_beside_a_full_queue_but_not_without_bound() -> None:
    scheduler = attached(max_queue_requests=2, max_num_seqs=2)
    for number in range(2):
        assert scheduler.submit(spec(number), 0.0) is None
    assert scheduler.submit(spec(2), 0.0) is not None
    for number in range(2, 4):
        assert scheduler.submit(spec(number, emitted_ids=[5]), 0.0) is None
    assert scheduler.submit(spec(4, emitted_ids=[5]), 0.0) is not None


def test_a_resubmission_goes_on_behind_what_was_delivered() -> None:
    scheduler = attached()
    scheduler.submit(spec(1, prompt=3, max_tokens=4, emitted_ids=[8, 9]), 0.0)
    plan = must_schedule(scheduler)
    assert (plan.admit[0].token_ids, plan.admit[0].num_prompt_tokens) == ([1, 1, 1, 8, 9], 3)
    assert answer(scheduler, plan, 5) == [TokensEvent(0, [SeqId(1)], None, [2], [5])]
    assert ends(answer(scheduler, must_schedule(scheduler), 6)) == {1: FinishReason.LENGTH}


def test_a_resubmission_that_was_complete_ends_at_once_and_the_loop_is_told_to_come_back() -> None:
    scheduler = attached()
    scheduler.submit(spec(1, max_tokens=2, emitted_ids=[8, 9]), 0.0)
    scheduler.submit(spec(2, emitted_ids=[8, 2], stop_token_ids=frozenset({2})), 0.0)
    assert scheduler.next_deadline() == float("-inf")
    assert ends(scheduler.expire(0.0)) == {1: FinishReason.LENGTH, 2: FinishReason.STOP}
    assert scheduler.next_deadline() is None


def test_steady_decode_repeats_without_columns() -> None:
    scheduler = attached()
    for number in range(3):
        scheduler.submit(spec(number, max_tokens=50), 0.0)
    answer(scheduler, must_schedule(scheduler), 5, 5, 5)
    for _ in range(3):
        plan = must_schedule(scheduler)
        assert (plan.repeat_decode, plan.row_lanes, plan.row_num_tokens, plan.num_rows) == (True, [], None, 3)
        answer(scheduler, plan, 5, 5, 5)


def test_no_more_plans_than_the_pipeline_is_deep() -> None:
    for depth in range(1, 5):
        scheduler = attached(pipeline_depth=depth)
        scheduler.submit(spec(1, max_tokens=50), 0.0)
        plans = [must_schedule(scheduler) for _ in range(depth)]
        assert scheduler.schedule(0.0) is None
        assert scheduler.num_inflight_plans == depth
        answer(scheduler, plans[0], 5)
        must_schedule(scheduler)


def test_tokens_are_grouped_by_who_they_are_for() -> None:
    scheduler = attached()
    for number, group in ((1, 7), (2, 3), (3, 7)):
        scheduler.submit(spec(number, group=group), 0.0)
    events = answer(scheduler, must_schedule(scheduler), 11, 12, 13)
    assert events == [
        TokensEvent(7, [SeqId(1), SeqId(3)], None, [0, 0], [11, 13]),
        TokensEvent(3, [SeqId(2)], None, [0], [12]),
    ]


def test_a_run_of_tokens_is_kept_up_to_the_stop_and_trimmed_behind_it() -> None:
    scheduler = attached(pipeline_depth=2)
    scheduler.submit(spec(1, max_tokens=9, stop_token_ids=frozenset({2})), 0.0)
    scheduler.submit(spec(2, prompt=2, max_tokens=3), 0.0)
    answer(scheduler, must_schedule(scheduler), 5, 5)
    plan = must_schedule(scheduler)
    events = scheduler.apply(StepResult(plan.step_id, [6, 2, 7, 8, 9, 9], num_tokens=[3, 3]), 0.0)
    assert events[0] == TokensEvent(0, [SeqId(1), SeqId(2)], [2, 2], [1, 1], [6, 2, 8, 9])
    assert ends(events) == {1: FinishReason.STOP, 2: FinishReason.LENGTH}


def test_planning_moves_on_by_what_a_run_brought() -> None:
    scheduler = attached()
    scheduler.submit(spec(1, prompt=2, max_tokens=20), 0.0)
    for _ in range(3):
        plan = must_schedule(scheduler)
        scheduler.apply(StepResult(plan.step_id, [6], num_tokens=[1]), 0.0)
    plan = must_schedule(scheduler)
    assert plan.append_block_ids, "position 4 is the first of the second block"
    scheduler.apply(StepResult(plan.step_id, [6, 6, 6, 6], num_tokens=[4]), 0.0)
    plan = must_schedule(scheduler)
    assert plan.append_block_ids, "positions 4 to 7 are computed: the next is 8"


def test_rows_of_the_stopped_are_dropped_and_others_are_not() -> None:
    scheduler = attached(pipeline_depth=2)
    scheduler.submit(spec(1, stop_token_ids=frozenset({2})), 0.0)
    scheduler.submit(spec(2), 0.0)
    first, second = must_schedule(scheduler), must_schedule(scheduler)
    assert ends(answer(scheduler, first, 2, 5)) == {1: FinishReason.STOP}
    assert answer(scheduler, second, 9, 6) == [TokensEvent(0, [SeqId(2)], None, [1], [6])]


@pytest.mark.parametrize(
    ("tokens", "status", "errors", "expected"),
    [
        ([NO_TOKEN, 5], StepStatus.ROW_ERRORS, {0: RowErrorCode.NUMERICAL}, FinishReason.NUMERICAL),
        ([NO_TOKEN, 5], StepStatus.ROW_ERRORS, {0: RowErrorCode.BAD_ROW}, FinishReason.INTERNAL),
        ([NO_TOKEN, 5], StepStatus.ROW_ERRORS, dict.fromkeys([0, 9], RowErrorCode.INTERNAL), FinishReason.INTERNAL),
        ([NO_TOKEN, 5], StepStatus.OK, {}, FinishReason.INTERNAL),
        ([-7, 5], StepStatus.OK, {}, FinishReason.INTERNAL),
    ],
)  # fmt: skip
def test_one_bad_row_ends_its_sequence_only(
    tokens: list[int], status: StepStatus, errors: dict[int, RowErrorCode], expected: FinishReason
) -> None:
    scheduler = attached()
    scheduler.submit(spec(1), 0.0)
    scheduler.submit(spec(2), 0.0)
    plan = must_schedule(scheduler)
    events = scheduler.apply(StepResult(plan.step_id, tokens, status=status, row_errors=errors), 0.0)
    assert events[0] == TokensEvent(0, [SeqId(2)], None, [0], [5])
    assert ends(events) == {1: expected}
    assert scheduler.check_invariants() == []


def test_a_token_in_the_middle_of_a_prompt_is_an_error_of_that_row() -> None:
    scheduler = attached()
    scheduler.submit(spec(1, prompt=20), 0.0)
    assert ends(answer(scheduler, must_schedule(scheduler), 5)) == {1: FinishReason.INTERNAL}


@pytest.mark.parametrize(
    "result",
    [
        StepResult(1, [5]),
        StepResult(1, [5, 5, 5]),
        StepResult(1, [5, 5], num_tokens=[1]),
        StepResult(1, [5, 5], num_tokens=[2, 0]),
        StepResult(1, [5, 5, 5], num_tokens=[1, 1]),
        StepResult(2, [5, 5]),
    ],
)
def test_a_result_that_does_not_fit_its_plan_raises_and_changes_nothing(result: StepResult) -> None:
    scheduler = attached(pipeline_depth=2)
    scheduler.submit(spec(1), 0.0)
    scheduler.submit(spec(2), 0.0)
    plan = must_schedule(scheduler)
    must_schedule(scheduler)
    before = scheduler.stats()
    with pytest.raises(ResultMismatchError):
        scheduler.apply(result, 0.0)
    assert scheduler.stats() == before
    assert len(answer(scheduler, plan, 5, 5)) == 1


def test_results_that_come_late_or_twice_are_counted_and_ignored() -> None:
    scheduler = attached()
    assert scheduler.apply(StepResult(1, [5]), 0.0) == []
    scheduler.submit(spec(1), 0.0)
    plan = must_schedule(scheduler)
    answer(scheduler, plan, 5)
    assert answer(scheduler, plan, 5) == []
    must_schedule(scheduler)
    assert answer(scheduler, plan, 5) == []
    assert answer(scheduler, replace(plan, step_id=99), 5) == []
    scheduler.detach_executor(0.0)
    assert scheduler.apply(StepResult(2, [5]), 0.0) == []
    assert scheduler.stats().num_stale_results_total == 5


def test_cancel_is_idempotent_and_knows_no_strangers() -> None:
    scheduler = attached()
    scheduler.submit(spec(1), 0.0)
    must_schedule(scheduler)
    assert ends(scheduler.cancel(SeqId(1), 0.0)) == {1: FinishReason.CANCELLED}
    assert scheduler.cancel(SeqId(1), 0.0) == []
    assert scheduler.cancel(SeqId(99), 0.0) == []


def test_what_is_out_of_time_is_never_planned() -> None:
    scheduler = attached()
    scheduler.submit(spec(1, deadline=1.0), 0.0)
    scheduler.submit(spec(2, queue_deadline=1.0), 0.0)
    assert scheduler.next_deadline() == 1.0
    assert scheduler.schedule(1.0) is None
    assert scheduler.next_deadline() == float("-inf")
    assert ends(scheduler.expire(1.0)) == {1: FinishReason.DEADLINE, 2: FinishReason.QUEUE_TIMEOUT}


def test_a_queue_deadline_does_not_touch_what_has_run() -> None:
    scheduler = attached()
    scheduler.submit(spec(1, queue_deadline=1.0), 0.0)
    must_schedule(scheduler, now=0.5)
    scheduler.detach_executor(0.6)
    assert scheduler.expire(5.0) == []
    assert scheduler.stats().preempted == 1


def test_the_end_tells_the_truth_about_waiting_and_work() -> None:
    scheduler = attached()
    scheduler.submit(spec(1, prompt=20, max_tokens=2, arrival=3.0), 3.0)
    answer(scheduler, must_schedule(scheduler, now=5.0), NO_TOKEN)
    scheduler.detach_executor(5.0)
    scheduler.attach_executor(EXECUTOR, 6.0)
    answer(scheduler, must_schedule(scheduler, now=6.0), NO_TOKEN)
    answer(scheduler, must_schedule(scheduler, now=6.0), 5)
    events = answer(scheduler, must_schedule(scheduler, now=6.0), 5, now=9.0)
    assert events[-1] == FinishedEvent(0, SeqId(1), FinishReason.LENGTH, 2, 2.0, 16 + 20, 0, 0)


def test_losing_the_executor_is_not_a_preemption_and_keeps_the_tokens() -> None:
    scheduler = attached(pipeline_depth=2)
    scheduler.submit(spec(1), 0.0)
    answer(scheduler, must_schedule(scheduler), 5)
    must_schedule(scheduler)
    assert scheduler.detach_executor(0.0) == []
    assert scheduler.detach_executor(0.0) == []
    stats = scheduler.stats()
    assert (stats.queue_requests, stats.num_preemptions_total, stats.num_executor_losses_total) == (1, 0, 1)
    scheduler.attach_executor(EXECUTOR, 0.0)
    plan = must_schedule(scheduler)
    assert plan.admit[0].token_ids == [1, 1, 1, 1, 5]
    assert plan.step_id == 3


def test_a_failed_step_voids_the_lanes_and_a_poisonous_sequence_is_given_up() -> None:
    scheduler = attached()
    scheduler.submit(spec(1), 0.0)
    for attempt in range(MAX_FAILED_STEPS):
        plan = must_schedule(scheduler)
        assert plan.admit, "every attempt is a new session"
        events = scheduler.apply(StepResult(plan.step_id, [], status=StepStatus.FAILED), 0.0)
        assert ends(events) == ({1: FinishReason.INTERNAL} if attempt == MAX_FAILED_STEPS - 1 else {})
    assert scheduler.stats().blocks_free == 16


def test_a_sequence_that_gets_on_between_failures_is_not_given_up() -> None:
    scheduler = attached()
    scheduler.submit(spec(1, max_tokens=20), 0.0)
    for _ in range(3 * MAX_FAILED_STEPS):
        answer(scheduler, must_schedule(scheduler), 5)
        plan = must_schedule(scheduler)
        assert ends(scheduler.apply(StepResult(plan.step_id, [], status=StepStatus.FAILED), 0.0)) == {}


def test_the_third_higher_priority_waits_for_who_has_made_room_twice() -> None:
    scheduler = attached(queue_policy=QueuePolicy.PRIORITY, max_num_seqs=1)
    scheduler.submit(spec(1, max_tokens=8), 0.0)
    must_schedule(scheduler)
    scheduler.apply(StepResult(1, [5]), 0.0)
    preempted_by = []
    for number in (2, 3, 4):
        scheduler.submit(spec(number, max_tokens=1, priority=number), 0.0)
        done: dict[int, FinishReason] = {}
        while number not in done:
            plan = must_schedule(scheduler)
            assert plan.num_rows == 1
            done |= ends(answer(scheduler, plan, 5))
        preempted_by.append(1 not in done)
        if 1 not in done:
            answer(scheduler, must_schedule(scheduler), 5)
    assert preempted_by == [True, True, False]


def test_who_made_room_twice_runs_with_all_its_blocks_reserved() -> None:
    scheduler = attached(queue_policy=QueuePolicy.PRIORITY, max_num_seqs=1)
    scheduler.submit(spec(1, prompt=4, max_tokens=20), 0.0)
    for number in (2, 3):
        answer(scheduler, must_schedule(scheduler), 5)
        scheduler.submit(spec(number, max_tokens=1, priority=1), 0.0)
        answer(scheduler, must_schedule(scheduler), 5)
    must_schedule(scheduler)
    stats = scheduler.stats()
    assert stats.blocks_used + stats.blocks_reserved == 6, "23 positions"
    assert stats.blocks_reserved > 0
    scheduler.cancel(SeqId(1), 0.0)
    assert scheduler.stats().blocks_reserved == 0


def test_no_preemption_that_would_not_be_enough() -> None:
    scheduler = attached(queue_policy=QueuePolicy.PRIORITY)
    scheduler.submit(spec(1, prompt=30, priority=9, max_tokens=30), 0.0)
    scheduler.submit(spec(2, prompt=4, priority=0, max_tokens=30), 0.0)
    for tokens in ([NO_TOKEN, NO_TOKEN], [5, 5]):
        plan = must_schedule(scheduler)
        answer(scheduler, plan, *tokens[: plan.num_rows])
    scheduler.submit(spec(3, prompt=50, priority=5), 0.0)
    must_schedule(scheduler)
    assert scheduler.stats().num_preemptions_total == 0


def test_one_that_was_passed_too_often_goes_before_those_with_better_ratios() -> None:
    scheduler = attached(max_skip_ahead=1, max_num_seqs=8)
    scheduler.submit(spec(1, prompt=12, max_tokens=40), 0.0)
    answer(scheduler, must_schedule(scheduler), 5)
    scheduler.submit(spec(2, prompt=50, max_tokens=2), 0.0)
    scheduler.submit(spec(3, prompt=2, max_tokens=9, arrival=10.0), 10.0)
    plan = must_schedule(scheduler, now=10.0)
    assert [admit.num_prompt_tokens for admit in plan.admit] == [2], "2 does not fit and is passed"
    answer(scheduler, plan, 5, 5)
    scheduler.submit(spec(4, prompt=2, arrival=10.0), 10.0)
    assert must_schedule(scheduler, now=11.0).admit == [], "1 / 2 is better than 11 / 50, but 2 has been passed"


def test_no_more_pass_than_may_in_one_plan() -> None:
    scheduler = attached(max_skip_ahead=2, max_num_seqs=8, queue_policy=QueuePolicy.FCFS)
    scheduler.submit(spec(1, prompt=12, max_tokens=40), 0.0)
    answer(scheduler, must_schedule(scheduler), 5)
    scheduler.submit(spec(2, prompt=50, max_tokens=2), 0.0)
    for number in range(3, 8):
        scheduler.submit(spec(number, prompt=2), 0.0)
    assert len(must_schedule(scheduler).admit) == 2


def test_the_books_notice_what_is_wrong() -> None:
    scheduler = attached(pipeline_depth=2)
    scheduler.submit(spec(1), 0.0)
    scheduler.submit(spec(2), 0.0)
    must_schedule(scheduler)
    running = scheduler._running
    assert running is not None
    running.num_running += 1
    assert scheduler.check_invariants()
    running.num_running -= 1
    seq = scheduler._sequences[SeqId(1)]
    assert seq.table is not None
    block_id = seq.table.block_ids.pop()
    assert any(f"block {block_id}" in problem for problem in scheduler.check_invariants())
    seq.table.block_ids.append(block_id)
    lane, seq.lane = seq.lane, 20
    assert any("lanes" in problem for problem in scheduler.check_invariants())
    seq.lane = lane
    seq.num_planned = 99
    assert any("99 positions planned" in problem for problem in scheduler.check_invariants())
    seq.num_planned = 4
    assert scheduler.check_invariants() == []


def test_a_lost_executor_leaves_no_fence_behind() -> None:
    """Growth may touch a sequence for a plan that is then not made: waiting for its result would be for ever."""
    scheduler = attached()
    scheduler.submit(spec(1), 0.0)
    scheduler._sequences[SeqId(1)].last_step_id = scheduler.next_step_id
    assert scheduler.schedule(0.0) is None
    scheduler.detach_executor(0.0)
    scheduler.attach_executor(EXECUTOR, 0.0)
    assert must_schedule(scheduler).admit


def test_a_preempted_sequence_is_not_started_again_before_its_rows_are_in() -> None:
    scheduler = attached(max_num_seqs=1, pipeline_depth=4, queue_policy=QueuePolicy.PRIORITY)
    scheduler.submit(spec(1), 0.0)
    first, second = must_schedule(scheduler), must_schedule(scheduler)
    scheduler.submit(spec(2, priority=1), 0.0)
    third = must_schedule(scheduler)
    assert third.release_lanes == [first.admit[0].lane]
    scheduler.cancel(SeqId(2), 0.0)
    assert scheduler.schedule(0.0) is None
    assert answer(scheduler, first, 5) == [TokensEvent(0, [SeqId(1)], None, [0], [5])]
    assert scheduler.schedule(0.0) is None
    assert answer(scheduler, second, 6) == [TokensEvent(0, [SeqId(1)], None, [1], [6])]
    assert must_schedule(scheduler).admit[0].token_ids == [1, 1, 1, 1, 5, 6]
    assert answer(scheduler, third, 9) == []


def test_a_higher_priority_has_its_chunk_before_lower_ones_that_already_run() -> None:
    scheduler = attached(max_num_batched_tokens=16, queue_policy=QueuePolicy.PRIORITY)
    scheduler.submit(spec(1, prompt=40), 0.0)
    answer(scheduler, must_schedule(scheduler), NO_TOKEN)
    scheduler.submit(spec(2, prompt=6, priority=1), 0.0)
    plan = must_schedule(scheduler)
    assert [len(admit.token_ids) for admit in plan.admit] == [6]
    assert plan.row_num_tokens == [6, 10]


def test_blocks_that_a_finishing_sequence_will_leave_are_waited_for() -> None:
    """The last row of one is in flight, so nobody is preempted for the block that the other needs."""
    scheduler = attached(replace(EXECUTOR, num_device_blocks=4), pipeline_depth=2)
    scheduler.submit(spec(1, prompt=7, max_tokens=9), 0.0)
    scheduler.submit(spec(2, prompt=6, max_tokens=3), 0.0)
    inflight = [must_schedule(scheduler)]
    for _ in range(12):
        while (plan := scheduler.schedule(0.0)) is not None:
            inflight.append(plan)
        if inflight:
            plan = inflight.pop(0)
            answer(scheduler, plan, *[5] * plan.num_rows)
    assert scheduler.stats().finished_total == 2
    assert scheduler.stats().num_preemptions_total == 0
