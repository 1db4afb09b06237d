"""Who is blamed when executors die."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core import suspects
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


def test_suspicion_is_inherited_by_who_is_submitted_again_in_another_s_place() -> None:
    scheduler = scheduler_with(1, 2)
    rows(scheduler)
    die(scheduler)
    for number in (1, 2):  # the gateway lost its session, and has another one
        scheduler.cancel(SeqId(number), 0.0)
        assert scheduler.submit(spec(number + 10, prompt=number), 0.0) is None
    (culprit,) = rows(scheduler)
    assert die(scheduler) == [(culprit, FinishReason.POISON)]
    assert scheduler.submit(spec(20, prompt=culprit - 10), 0.0) is not None


@pytest.mark.parametrize("is_again_there", [True, False])
def test_who_left_between_a_death_and_the_next_executor_is_suspected_all_the_same(is_again_there: bool) -> None:
    scheduler = scheduler_with(1)
    rows(scheduler)
    scheduler.detach_executor(0.0)
    scheduler.cancel(SeqId(1), 0.0)
    if is_again_there:
        assert scheduler.submit(spec(11, prompt=1), 0.0) is None
    scheduler.attach_executor(EXECUTOR, 0.0, predecessor_died=True)
    if not is_again_there:
        assert scheduler.submit(spec(11, prompt=1), 0.0) is None
    assert rows(scheduler) == {11}
    assert die(scheduler) == [(11, FinishReason.POISON)]


def test_a_second_death_counts_also_where_the_culprit_has_left_before_it_is_known() -> None:
    scheduler = scheduler_with(1)
    rows(scheduler)
    die(scheduler)
    rows(scheduler)
    scheduler.detach_executor(0.0)
    scheduler.cancel(SeqId(1), 0.0)
    scheduler.attach_executor(EXECUTOR, 0.0, predecessor_died=True)
    assert scheduler.submit(spec(11, prompt=1), 0.0) is not None


def test_once_its_only_suspect_is_cleared_a_prompt_is_as_good_as_any() -> None:
    scheduler = scheduler_with(1)
    rows(scheduler)
    die(scheduler)
    rows(scheduler)
    answer(scheduler)
    assert scheduler.submit(spec(11, prompt=1), 0.0) is None
    assert rows(scheduler) == {1, 11}
    assert die(scheduler) == []


def test_a_hundred_retries_of_a_poisonous_request_kill_two_executors() -> None:
    scheduler = scheduler_with(2)
    num_deaths = num_refused = 0
    for number in range(100, 200):
        if scheduler.submit(spec(number, prompt=1), 0.0) is not None:
            num_refused += 1
            continue
        while number not in rows(scheduler):
            answer(scheduler)
        num_deaths += 1
        die(scheduler)
        scheduler.cancel(SeqId(number), 0.0)
    assert (num_deaths, num_refused) == (2, 98)
    assert SeqId(2) in scheduler._sequences, "it was cleared before the second death"


def test_all_who_share_the_prompt_share_the_blame() -> None:
    scheduler = Scheduler(replace(CONFIG, max_num_seqs=1))
    scheduler.attach_executor(EXECUTOR, 0.0)
    for number in (1, 2, 3):
        assert scheduler.submit(spec(number, prompt=1 if number < 3 else 3), 0.0) is None
    assert rows(scheduler) == {1}
    die(scheduler)
    scheduler.cancel(SeqId(1), 0.0)
    assert rows(scheduler) == {2}
    assert die(scheduler) == [(2, FinishReason.POISON)], "the first had its prompt"


def test_one_death_counts_once_for_copies_that_were_cancelled_before_it() -> None:
    scheduler = scheduler_with()
    for number in (1, 2):
        assert scheduler.submit(spec(number, prompt=5), 0.0) is None
    rows(scheduler)  # one computes the prompt for both
    answer(scheduler)
    assert rows(scheduler) == {1, 2}
    for number in (1, 2):
        scheduler.cancel(SeqId(number), 0.0)
    assert scheduler.submit(spec(7, prompt=5), 0.0) is None
    assert die(scheduler) == []
    assert scheduler.submit(spec(9, prompt=5), 0.0) is None


def test_a_copy_in_the_queue_ends_with_the_one_that_is_poisonous() -> None:
    scheduler = Scheduler(replace(CONFIG, max_num_seqs=1))
    scheduler.attach_executor(EXECUTOR, 0.0)
    for number in (1, 2, 3):
        assert scheduler.submit(spec(number, prompt=1 if number < 3 else 3), 0.0) is None
    rows(scheduler)
    die(scheduler)
    assert rows(scheduler) == {1}
    assert set(die(scheduler)) == {(1, FinishReason.POISON), (2, FinishReason.POISON)}


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_who_inherits_a_suspicion_and_does_well_takes_it_away(num_tokens: int) -> None:
    scheduler = scheduler_with(1)
    rows(scheduler)
    die(scheduler)
    scheduler.cancel(SeqId(1), 0.0)
    assert scheduler.submit(spec(11, prompt=1), 0.0) is None
    for _ in range(num_tokens):
        rows(scheduler)
        answer(scheduler)
    if num_tokens == 1:  # cleared, still running, and under way again
        rows(scheduler)
        assert die(scheduler) == []
        scheduler = scheduler_with()
    assert scheduler.submit(spec(12, prompt=1), 0.0) is None
    rows(scheduler)
    assert die(scheduler) == [], "the first death since"


def test_suspicion_fades() -> None:
    scheduler = scheduler_with(1)
    rows(scheduler)
    die(scheduler)
    scheduler.cancel(SeqId(1), 0.0)
    assert scheduler.submit(spec(11, prompt=1), REFUSED_S) is None
    rows(scheduler)
    assert die(scheduler) == []


def test_prompts_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "MAX_REFUSED", 2)
    scheduler = scheduler_with()
    for number in (1, 2, 3):
        for again in (0, 10):
            assert scheduler.submit(spec(number + again, prompt=number), 0.0) is None
            rows(scheduler)
            die(scheduler)
            scheduler.cancel(SeqId(number + again), 0.0)
    refused = [scheduler.submit(spec(number + 20, prompt=number), 0.0) is not None for number in (1, 2, 3)]
    assert refused == [False, True, True]


def test_each_is_cleared_at_its_own_place_whoever_else_has_its_prompt() -> None:
    scheduler = scheduler_with(1)
    for _ in range(3):
        rows(scheduler)
        answer(scheduler)
    assert scheduler.submit(spec(11, prompt=1), 0.0) is None
    assert rows(scheduler) == {1, 11}
    die(scheduler)
    for _ in range(3):
        rows(scheduler)
        answer(scheduler)
    assert rows(scheduler) == {1, 11}
    assert die(scheduler) == [], "the second has got past its first token, if not past the fifth of the first"
