"""Limits, fences, deadlines and victims, each alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_svc.blocks.pool import BlockPool
from cache_svc.blocks.table import BlockTable
from scheduler_svc.core.deadlines import Deadlines
from scheduler_svc.core.events import FinishReason, RefusalReason
from scheduler_svc.core.fences import Fences, LanePool
from scheduler_svc.core.limits import check_config, combine, refuse_length
from scheduler_svc.core.params import ExecutorLimits, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.preemption import MAX_PREEMPTIONS, choose_victim
from scheduler_svc.core.sequence import Sequence

EXECUTOR = ExecutorLimits(16, 100, max_rows=32, max_tokens=256, num_lanes=96, max_model_len=2048)


def test_the_smaller_limit_wins() -> None:
    limits = combine(SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=64), EXECUTOR)
    assert (limits.max_tokens, limits.max_seqs) == (256, 32)
    limits = combine(SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=64), EXECUTOR)
    assert (limits.max_tokens, limits.max_seqs) == (8, 8), "every running sequence can have its token"
    assert combine(SchedulerConfig(watermark=0.011), EXECUTOR).watermark_blocks == 2
    assert limits.token_limit == 1600


@pytest.mark.parametrize(
    "field", ["block_size", "num_device_blocks", "max_rows", "max_tokens", "num_lanes", "max_model_len"]
)
def test_an_executor_without_any_of_something_is_an_error(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        combine(SchedulerConfig(), replace(EXECUTOR, **{field: 0}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("max_prefill_chunk", 0),
        ("max_queue_requests", 0),
        ("max_skip_ahead", -1),
        ("pipeline_depth", 0),
        ("pipeline_depth", 5),
        ("watermark", 1.0),
        ("watermark", -0.1),
    ],
)
def test_a_setting_that_cannot_work_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        check_config(replace(SchedulerConfig(), **{field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("max_model_len", "prompt_len", "reason"),
    [
        (100, 99, None),
        (100, 100, RefusalReason.CONTEXT_LENGTH),
        (5000, 1599, None),
        (5000, 1600, RefusalReason.PROMPT_EXCEEDS_KV_CAPACITY),
    ],
)
def test_a_prompt_needs_room_for_one_token_more(
    max_model_len: int, prompt_len: int, reason: RefusalReason | None
) -> None:
    refusal = refuse_length(combine(SchedulerConfig(), replace(EXECUTOR, max_model_len=max_model_len)), prompt_len)
    assert (refusal and refusal.reason) == reason
    if refusal:
        assert str(prompt_len) in refusal.message
        assert str(100) in refusal.message


def test_blocks_touched_by_a_plan_in_flight_come_back_with_its_result() -> None:
    pool = BlockPool(6)
    fences = Fences(pool, LanePool(2), applied_step_id=4)
    early, late = pool.allocate(2), pool.allocate(3)
    assert early is not None
    assert late is not None
    fences.drop_blocks(early, last_step_id=4)
    fences.drop_blocks(late, last_step_id=6)
    assert (pool.num_free, pool.num_in_flight, fences.held_blocks()) == (3, 3, late)
    fences.passed(5)
    assert pool.num_in_flight == 3
    fences.passed(6)
    assert (pool.num_free, fences.held_blocks()) == (6, [])


def test_a_lane_comes_back_with_the_plan_that_carries_its_release() -> None:
    lanes = LanePool(2)
    fences = Fences(BlockPool(1), lanes, applied_step_id=0)
    assert lanes.take() == (0, 1)
    fences.drop_lane(0)
    assert fences.has_releases
    fences.passed(1)
    assert lanes.num_free == 1
    assert fences.take_releases(2) == [0]
    assert fences.take_releases(3) == []
    assert (lanes.num_free, fences.held_lanes()) == (1, [0])
    fences.passed(2)
    assert (lanes.take(), lanes.take()) == ((1, 1), (0, 2))


def watched(*specs: SequenceSpec) -> tuple[Deadlines, dict[SeqId, Sequence]]:
    sequences: dict[SeqId, Sequence] = {}
    deadlines = Deadlines(sequences)
    for spec in specs:
        sequences[spec.seq_id] = Sequence(spec, priority=0)
        deadlines.add(sequences[spec.seq_id])
    return deadlines, sequences


def test_deadlines_come_in_order_and_forget_the_ended() -> None:
    deadlines, sequences = watched(
        SequenceSpec(SeqId(1), [1], 1, deadline=3.0),
        SequenceSpec(SeqId(2), [1], 1, deadline=2.0),
        SequenceSpec(SeqId(3), [1], 1, queue_deadline=1.0),
        SequenceSpec(SeqId(4), [1], 1),
    )
    assert deadlines.next() == 1.0
    sequences[SeqId(3)].first_run = 0.5
    assert deadlines.next() == 2.0, "it has run: its queue deadline is void"
    assert deadlines.pop_due(1.9) is None
    assert deadlines.pop_due(2.0) == (sequences[SeqId(2)], FinishReason.DEADLINE)
    del sequences[SeqId(1)]
    assert deadlines.next() is None


def test_a_queue_deadline_that_passes_is_a_queue_timeout() -> None:
    deadlines, sequences = watched(SequenceSpec(SeqId(3), [1], 1, queue_deadline=1.0, deadline=5.0))
    assert deadlines.pop_due(1.0) == (sequences[SeqId(3)], FinishReason.QUEUE_TIMEOUT)


def test_deadlines_of_ended_sequences_do_not_pile_up() -> None:
    deadlines, sequences = watched()
    for number in range(5000):
        seq = Sequence(SequenceSpec(SeqId(number), [1], 1, deadline=1e9), priority=0)
        sequences[seq.seq_id] = seq
        deadlines.add(seq)
        del sequences[seq.seq_id]
    assert len(deadlines._heap) < 200


def running(number: int, arrival: float, priority: int = 0, num_planned: int = 5, num_preemptions: int = 0) -> Sequence:
    seq = Sequence(SequenceSpec(SeqId(number), [1] * 5, 40, arrival=arrival), priority=priority)
    table = BlockTable(16)
    table.extend([number])
    seq.start(number, table, 0, 0, 0.0)
    seq.num_planned = num_planned
    seq.num_preemptions = num_preemptions
    return seq


def victim(*sequences: Sequence, below: int = 9, last: int | None = None) -> int | None:
    chosen = choose_victim(sequences, below, None if last is None else SeqId(last))
    return None if chosen is None else int(chosen.seq_id)


def test_the_lowest_priority_makes_room_then_the_last_arrived_then_the_least_computed() -> None:
    assert victim(running(1, 0.0, priority=1), running(2, 9.0, priority=5)) == 1
    assert victim(running(1, 1.0), running(2, 2.0), running(3, 1.5)) == 2
    assert victim(running(1, 1.0, num_planned=9), running(2, 1.0, num_planned=6)) == 2


def test_nobody_makes_room_for_a_lower_priority() -> None:
    assert victim(running(1, 0.0, priority=3), below=3) is None
    assert victim(running(1, 0.0, priority=3), below=4) == 1


def test_not_the_same_victim_twice_in_a_row_where_another_of_its_priority_exists() -> None:
    assert victim(running(1, 1.0), running(2, 2.0), last=2) == 1
    assert victim(running(2, 2.0), last=2) == 2
    assert victim(running(1, 1.0, priority=1), running(2, 2.0), last=2) == 2


def test_who_made_room_often_enough_or_is_about_to_end_is_left_alone() -> None:
    assert victim(running(1, 1.0), running(2, 2.0, num_preemptions=MAX_PREEMPTIONS)) == 1
    assert victim(running(1, 1.0), running(2, 2.0, num_planned=44)) == 1
