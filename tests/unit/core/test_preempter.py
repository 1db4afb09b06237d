"""What making room leaves behind: the forecast to compare with, who was last, and where the victim waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.params import ExecutorLimits, PreemptionMode, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.preempter import Preempter
from scheduler_svc.core.preemption import Action, Reason, forecast_s
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceState
from tests.unit.core.kv_samples import EXECUTOR


def running(
    mode: PreemptionMode = PreemptionMode.AUTO, executor: ExecutorLimits = EXECUTOR
) -> tuple[Scheduler, Preempter, Sequence, Sequence]:
    """Two sequences of 9 tokens each that run, the second the younger one."""
    scheduler = Scheduler(replace(SchedulerConfig(), preemption_mode=mode))
    scheduler.attach_executor(executor, 0.0)
    for number in (1, 2):
        spec = SequenceSpec(SeqId(number), list(range(number * 100, number * 100 + 9)), 20, arrival=float(number))
        assert scheduler.submit(spec, 3.0) is None
    plan = scheduler.schedule(3.0)
    assert plan is not None
    scheduler.apply(StepResult(plan.step_id, [7] * plan.num_rows), 3.0)
    assert scheduler._session is not None
    return scheduler, scheduler._session.preempter, scheduler._sequences[SeqId(1)], scheduler._sequences[SeqId(2)]


@pytest.mark.parametrize(
    ("mode", "state"),
    [(PreemptionMode.SWAP, SequenceState.SWAPPED), (PreemptionMode.RECOMPUTE, SequenceState.WAITING)],
)
def test_the_cheapest_forecast_is_kept_whatever_was_done(mode: PreemptionMode, state: SequenceState) -> None:
    scheduler, preempter, _, seq = running(mode)
    assert scheduler._running is not None
    limits = scheduler._running.limits
    forecast = forecast_s(limits, scheduler._running.victim(seq), 3, 1.0)
    preempter.preempt(seq, 3, Reason.MEMORY)
    assert (seq.state, seq.num_preemptions, seq.in_front) == (state, 1, True)
    assert seq.forecast is not None
    assert seq.forecast.best_s == min(forecast.values()) < max(forecast.values())
    assert seq.forecast.let_go == (mode is PreemptionMode.RECOMPUTE)
    num_copied = 3 if mode is PreemptionMode.SWAP else 0
    assert seq.forecast.spent_s == num_copied * limits.costs.swap_out_s
    assert scheduler.check_invariants() == []


def test_the_last_victim_is_spared_the_next_time() -> None:
    scheduler, preempter, _, younger = running()
    assert scheduler._running is not None
    assert scheduler._running.last_victim is None
    preempter.preempt(younger, 1, Reason.MEMORY)
    assert scheduler._running.last_victim == younger.seq_id


def test_what_was_asked_for_by_hand_counts_neither_as_a_preemption_nor_as_a_forecast() -> None:
    scheduler, _, older, _ = running()
    assert scheduler.preempt(older.seq_id, Action.RECOMPUTE)
    assert (older.num_preemptions, older.forecast) == (0, None)
    assert scheduler.stats().num_preemptions_total == 0


def test_a_swap_without_room_becomes_and_is_counted_as_letting_go() -> None:
    scheduler, preempter, _, seq = running(PreemptionMode.SWAP, replace(EXECUTOR, num_host_blocks=2))
    preempter.preempt(seq, 1, Reason.PRIORITY)
    assert seq.state is SequenceState.WAITING
    assert seq.forecast is not None
    assert seq.forecast.let_go
    assert scheduler.stats().preemptions_total == {(Action.RECOMPUTE, Reason.PRIORITY): 1}


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_a_lost_executor_voids_forecasts_and_queues_everybody_once(mode: PreemptionMode) -> None:
    scheduler, preempter, _, seq = running(mode)
    preempter.preempt(seq, 1, Reason.MEMORY)
    scheduler.detach_executor(4.0)
    assert seq.forecast is None, "it is not to blame for what the loss cost"
    stats = scheduler.stats()
    assert (stats.queue_requests, stats.preempted, stats.swapped, stats.queue_tokens) == (2, 2, 0, 20)
