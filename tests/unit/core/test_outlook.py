"""What admission leaves to those that run."""

from __future__ import annotations

import random
from dataclasses import replace
from math import ceil

import pytest

from scheduler_svc.core.outlook import Outlook
from scheduler_svc.core.params import ExecutorLimits, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import NO_TOKEN, StepResult
from scheduler_svc.core.reserve import OutputLengths
from scheduler_svc.core.running import Need, RunningSet
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from tests.unit.core.kv_samples import limits

CONFIG = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, max_prefill_chunk=64, watermark=0.0)
EXECUTOR = ExecutorLimits(4, 20, max_rows=8, max_tokens=64, num_lanes=48, max_model_len=80)


def scheduler_with(**settings: object) -> Scheduler:
    scheduler = Scheduler(replace(CONFIG, **settings))  # type: ignore[arg-type]
    scheduler.attach_executor(EXECUTOR, 0.0)
    return scheduler


def submit(scheduler: Scheduler, number: int, prompt: int, max_tokens: int, **fields: object) -> None:
    prompt_ids = list(range(100 * number, 100 * number + prompt))
    spec = SequenceSpec(SeqId(number), prompt_ids, max_tokens, **fields)  # type: ignore[arg-type]
    assert scheduler.submit(spec, 0.0) is None


def step(scheduler: Scheduler) -> int:
    """One plan and its result; how many were admitted."""
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert scheduler._running is not None
    record = scheduler._running.inflight[-1]
    tokens = [NO_TOKEN if row in record.silent else 7 for row in range(len(record.rows))]
    scheduler.apply(StepResult(plan.step_id, tokens), 0.0)
    assert scheduler.check_invariants() == []
    return len(plan.admit)


@pytest.mark.parametrize(("share", "num_preemptions"), [(1.0, 0), (0.0, 1)])
def test_what_a_running_sequence_will_need_is_left_to_it(share: float, num_preemptions: int) -> None:
    scheduler = scheduler_with(growth_reserve=share)
    submit(scheduler, 1, 20, 40)  # 6 blocks now, 15 at its end
    assert step(scheduler) == 1
    submit(scheduler, 2, 30, 24)  # 8 blocks now, 14 at its end
    assert step(scheduler) == (0 if share else 1)
    while scheduler.stats().finished_total < 2:
        step(scheduler)
    assert (scheduler.stats().num_preemptions_total > 0) == bool(num_preemptions)


def test_a_short_one_finds_its_place_beside_a_long_one() -> None:
    scheduler = scheduler_with()
    submit(scheduler, 1, 20, 40)
    step(scheduler)
    submit(scheduler, 2, 30, 24)
    submit(scheduler, 3, 12, 4)  # 4 blocks, and gone before the long one needs them
    assert step(scheduler) == 1
    assert scheduler.stats().running == 2


def test_a_higher_priority_need_not_leave_anything_to_lower_ones() -> None:
    scheduler = scheduler_with()
    submit(scheduler, 1, 20, 40)
    step(scheduler)
    submit(scheduler, 2, 30, 24, priority=1)
    assert step(scheduler) == 1


def test_alone_it_may_start_whatever_it_will_need() -> None:
    scheduler = scheduler_with()
    submit(scheduler, 1, 40, 40)
    assert step(scheduler) == 1


def test_what_one_was_refused_a_smaller_one_may_still_have() -> None:
    scheduler = scheduler_with(queue_policy=type(CONFIG.queue_policy).FCFS)
    submit(scheduler, 1, 20, 40)
    step(scheduler)
    for number, prompt, max_tokens in ((2, 32, 20), (3, 40, 20), (4, 10, 2)):
        submit(scheduler, number, prompt, max_tokens)
    assert step(scheduler) == 1
    assert scheduler.stats().running == 2


def test_the_only_one_of_its_priority_may_start_whatever_it_will_need() -> None:
    scheduler = scheduler_with()
    submit(scheduler, 1, 20, 40)
    step(scheduler)
    submit(scheduler, 2, 36, 44, priority=1)  # with what it will need, the pool is its own
    assert step(scheduler) == 1


def has_room(running: RunningSet, lengths: OutputLengths, share: float, seq: Sequence, need: Need) -> bool:
    """What `Outlook` is to answer, by following everybody to the end."""

    def to_come(other: Sequence, num_slots: int) -> float:
        remaining = lengths.remaining(other.num_output_tokens, other.token_limit - other.prompt_len)
        return share * max(0.0, len(other.token_ids) + remaining - 1 - num_slots)

    pool = running.pool
    peers = [(to_come(s, s.num_slots), s.num_brought) for s in running if s.priority >= seq.priority]
    if 2 * (pool.num_used + need.num_taken) <= pool.num_blocks or not peers:
        return True
    everyone = [*peers, (to_come(seq, need.num_blocks * 4), need.num_taken)]
    peak = max(
        sum(num_blocks + ceil(moment / 4) for growth, num_blocks in everyone if growth >= moment)
        for moment, _ in everyone
    )
    num_shared = pool.num_used - sum(s.num_brought for s in running)
    return num_shared + peak <= pool.num_blocks


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_who_comes_later_in_a_plan_is_judged_with_those_who_started_in_it(share: float) -> None:
    rng = random.Random(3)
    answers = []
    for _ in range(60):
        lengths = OutputLengths()
        for _ in range(rng.choice([0, 50])):
            lengths.finished(rng.randint(1, 30), at_limit=rng.random() < 0.3)
        running = RunningSet(limits(replace(EXECUTOR, num_device_blocks=30)), applied_step_id=0)
        outlook = Outlook(running, lengths, share)
        for number in range(40):
            prompt = [rng.randrange(3), *range(rng.randint(1, 20))]
            spec = SequenceSpec(SeqId(number), prompt, rng.randint(1, 40))
            seq = Sequence(spec, priority=rng.randint(0, 1))
            need = running.need(seq)
            if need.num_taken > running.pool.num_allocatable:
                continue
            answers.append(outlook.has_room_for(seq, need))
            assert answers[-1] == has_room(running, lengths, share, seq, need)
            if answers[-1] and rng.random() < 0.8:
                running.start(seq, need, 1, 0.0)
                outlook.started(seq)
                running.memory.publish(seq, len(prompt))  # some that come later find its blocks
    assert answers.count(False) > 100, answers.count(False)
