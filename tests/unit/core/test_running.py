"""What one executor has been told: what a start takes, what growing adds, and what stays behind of who leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.params import ExecutorLimits, SeqId, SequenceSpec
from scheduler_svc.core.plan import Admit, StepPlan
from scheduler_svc.core.preemption import Victim
from scheduler_svc.core.running import InFlight, RunningSet
from scheduler_svc.core.sequence import Sequence, Stash
from tests.unit.core.kv_samples import EXECUTOR, copy, limits

PROMPT = list(range(13))
"""Three blocks of 4 and one token."""


def empty(executor: ExecutorLimits = EXECUTOR) -> RunningSet:
    return RunningSet(limits(executor), applied_step_id=0)


def waiting(number: int, prompt: list[int] | None = None, priority: int = 0) -> Sequence:
    return Sequence(SequenceSpec(SeqId(number), PROMPT if prompt is None else prompt, 20), priority=priority)


def start(running: RunningSet, seq: Sequence) -> Admit:
    return running.start(seq, running.need(seq), 1, 0.0)


def computed(running: RunningSet, seq: Sequence, num_positions: int = len(PROMPT)) -> Sequence:
    """It has started, and the results of so many positions of its prompt are in."""
    start(running, seq)
    seq.num_planned = num_positions
    running.settle_chunks(InFlight(1, [seq], frozenset(), [(seq, num_positions)]), set())
    return seq


def swapped(running: RunningSet, seq: Sequence) -> Stash:
    """It has left for the host tier, and the copies are done."""
    stash = running.memory.stash(seq)
    assert stash is not None
    running.take_away(seq)
    seq.swap_out(stash)
    running.fences.passed(1)
    copy(running.memory, 2)
    return stash


# Who runs


def test_the_lowest_priority_is_that_of_those_who_run_now() -> None:
    running = empty()
    assert running.lowest_priority is None
    sequences = [waiting(priority, [priority] * 3, priority) for priority in (2, 0, 1)]
    for seq in sequences:
        start(running, seq)
    assert running.lowest_priority == 0
    running.take_away(sequences[1])
    assert running.lowest_priority == 1
    running.take_away(sequences[0])
    running.take_away(sequences[2])
    assert running.lowest_priority is None


def test_a_sweep_says_once_that_somebody_has_left() -> None:
    running = empty()
    seq = waiting(1)
    start(running, seq)
    assert not running.sweep()
    running.take_away(seq)
    seq.requeue()
    assert running.sweep()
    assert not running.sweep()
    assert running.prefilling == []


def test_who_has_just_been_admitted_is_in_the_plan_even_without_a_row() -> None:
    running = empty()
    seq = waiting(1)
    assert running.is_settled(seq)
    start(running, seq)
    assert not running.is_settled(seq)
    running.take_away(seq)
    assert running.pool.num_in_flight == running.num_leaving == 4
    running.fences.passed(1)
    assert running.is_settled(seq)
    assert running.num_leaving == 0


def test_blocks_that_only_a_copy_holds_are_leaving() -> None:
    running = empty()
    seq = computed(running, waiting(1))
    assert running.memory.stash(seq) is not None
    running.take_away(seq)
    running.fences.passed(1)
    assert running.pool.num_in_flight == 0
    assert running.num_leaving == 4
    copy(running.memory, 2)
    assert running.num_leaving == 0


# What a start takes


def test_blocks_that_others_use_cost_nothing_and_cached_ones_do() -> None:
    running = empty()
    first = computed(running, waiting(1))
    assert running.need(waiting(2)).num_taken == 1, "of four blocks three are there"
    running.take_away(first)
    running.fences.passed(1)
    assert running.need(waiting(2)).num_taken == 4


def test_a_swapped_one_brings_back_only_what_the_device_has_lost() -> None:
    running = empty()
    seq = computed(running, waiting(1))
    table = [] if seq.table is None else list(seq.table.block_ids)
    stash = swapped(running, seq)
    assert running.need(seq).num_cached == 12, "the last known token is left to compute"
    seq.token_ids.append(7)  # the last row was in flight when it left
    need = running.need(seq)
    assert need.device_ids == [*table[:3], None]
    assert need.host_ids == stash.host_ids[3:]
    assert need.num_cached == 13
    start(running, seq)
    assert seq.stash is None
    assert seq.num_brought == 1, "three were there when it started"


def test_a_swapped_one_finds_what_another_has_computed_meanwhile() -> None:
    running = empty()
    seq = computed(running, waiting(1), 4)
    swapped(running, seq)
    computed(running, waiting(2))
    need = running.need(seq)
    assert (need.num_cached, need.host_ids) == (12, [])


def test_a_swapped_one_waits_for_nobody_s_prefix() -> None:
    running = empty()
    seq = computed(running, waiting(1), 4)
    swapped(running, seq)
    start(running, waiting(2))
    assert running.need(waiting(3)).should_wait
    assert not running.need(seq).should_wait


def test_nobody_is_to_wait_for_blocks_that_were_found() -> None:
    running = empty()
    running.take_away(computed(running, waiting(1), 4))
    seq = waiting(2)
    start(running, seq)
    assert seq.num_planned == 4
    assert running.memory.prefix.expected_by() == [seq, seq]


# Growing


def test_an_admission_says_what_was_true_when_it_was_planned() -> None:
    running = empty()
    seq = waiting(1)
    admit = start(running, seq)
    seq.num_planned = 16
    plan = StepPlan(2)
    assert running.grow(seq, plan)
    seq.token_ids.append(7)
    assert plan.append_lanes == [admit.lane]
    assert (len(admit.block_ids), admit.token_ids) == (4, PROMPT)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_sequence_grows_by_one_block(block_size: int) -> None:
    running = empty(replace(EXECUTOR, block_size=block_size))
    seq = waiting(1, [5, 6])
    start(running, seq)
    seq.num_planned = seq.horizon
    plan = StepPlan(2)
    assert running.grow(seq, plan)
    assert len(plan.append_block_ids) == 1


# Leaving


def test_a_victim_s_figures_tell_computed_shared_and_copied_blocks_apart() -> None:
    running = empty()
    seq = computed(running, waiting(1), 4)
    assert running.victim(seq) == Victim(num_blocks=1, num_freed=4, num_to_copy=1)
    seq.num_planned = 13
    running.memory.publish(seq, 13)
    assert running.victim(seq) == Victim(num_blocks=4, num_freed=4, num_to_copy=4)
    running.memory.stash(seq)
    copy(running.memory, 2)
    assert running.victim(seq).num_to_copy == 1, "the block that is not full has no key to be found by"
    start(running, waiting(2))
    assert running.victim(seq).num_freed == 1


@pytest.mark.parametrize(("is_sound", "num_kept"), [(True, 3), (False, 0)])
def test_what_is_not_sound_is_never_known(is_sound: bool, num_kept: int) -> None:
    running = empty()
    seq = waiting(1)
    start(running, seq)
    seq.num_planned = 13
    seq.token_ids.append(7)
    running.settle_chunks(InFlight(1, [seq], frozenset(), [(seq, 8)]), {seq.seq_id})
    assert (seq.num_computed, running.pool.index()) == (0, {})
    seq.num_computed = 13
    running.take_away(seq, is_sound=is_sound)
    assert len(running.pool.index()) == num_kept


def test_a_result_says_nothing_about_who_has_left_since() -> None:
    running = empty()
    seq = waiting(1)
    start(running, seq)
    seq.num_planned = 8
    running.take_away(seq)
    seq.requeue()
    running.settle_chunks(InFlight(1, [seq], frozenset(), [(seq, 8)]), set())
    assert (seq.num_computed, running.pool.index()) == (0, {})
