"""Who is blamed when executors die."""

from __future__ import annotations

from scheduler_svc.core.events import FinishedEvent, FinishReason, RefusalReason
from scheduler_svc.core.params import ExecutorLimits, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.suspects import REFUSED_S

CONFIG = SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4, max_prefill_chunk=16, pipeline_depth=1)
EXECUTOR = ExecutorLimits(4, 40, max_rows=8, max_tokens=32, num_lanes=24, max_model_len=64)


def scheduler_with(*numbers: int) -> Scheduler:
    scheduler = Scheduler(CONFIG)
    scheduler.attach_executor(EXECUTOR, 0.0)
    for number in numbers:
        assert scheduler.submit(spec(number), 0.0) is None
    return scheduler


def spec(number: int, prompt: int | None = None) -> SequenceSpec:
    base = 100 * (number if prompt is None else prompt)
    return SequenceSpec(SeqId(number), list(range(base, base + 6)), 9)


def rows(scheduler: Scheduler) -> set[int]:
    """Plans, and says who has a row."""
    assert scheduler.schedule(0.0) is not None
    running = scheduler._running
    assert running is not None
    return {seq.seq_id for seq in running.inflight[-1].rows}


def answer(scheduler: Scheduler) -> None:
    running = scheduler._running
    assert running is not None
    record = running.inflight[0]
    scheduler.apply(StepResult(record.step_id, [7] * len(record.rows)), 0.0)


def die(scheduler: Scheduler) -> list[tuple[int, FinishReason]]:
    events = scheduler.detach_executor(0.0)
    events += scheduler.attach_executor(EXECUTOR, 0.0, predecessor_died=True)
    return [(event.seq_id, event.reason) for event in events if isinstance(event, FinishedEvent)]


def test_after_a_death_suspects_run_one_at_a_time_beside_the_others() -> None:
    scheduler = scheduler_with(1, 2, 3)
    assert rows(scheduler) == {1, 2, 3}
    assert die(scheduler) == []
    assert scheduler.submit(spec(4), 0.0) is None
    first = rows(scheduler)
    assert len(first & {1, 2, 3}) == 1
    assert 4 in first


def test_one_that_gets_past_what_it_ran_is_cleared_and_the_next_has_its_turn() -> None:
    scheduler = scheduler_with(1, 2)
    rows(scheduler)
    die(scheduler)
    assert len(rows(scheduler)) == 1
    answer(scheduler)
    assert rows(scheduler) == {1, 2}
    answer(scheduler)
    rows(scheduler)
    assert die(scheduler) == [], "both have got past their first token since"


def test_the_second_death_under_one_sequence_ends_it_and_its_prompt_is_refused_for_a_while() -> None:
    scheduler = scheduler_with(1, 2)
    rows(scheduler)
    die(scheduler)
    (culprit,) = rows(scheduler)
    assert die(scheduler) == [(culprit, FinishReason.POISON)]
    again = scheduler.submit(spec(10, prompt=culprit), REFUSED_S - 1.0)
    assert again is not None
    assert again.reason is RefusalReason.POISON
    assert scheduler.submit(spec(11, prompt=3 - culprit), 0.0) is None
    assert scheduler.submit(spec(12, prompt=culprit), REFUSED_S) is None


def test_an_executor_that_comes_back_or_left_on_purpose_makes_nobody_a_suspect() -> None:
    scheduler = scheduler_with(1, 2)
    rows(scheduler)
    scheduler.detach_executor(0.0)
    scheduler.attach_executor(EXECUTOR, 0.0)
    assert rows(scheduler) == {1, 2}
