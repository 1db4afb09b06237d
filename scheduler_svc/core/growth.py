"""Before each batch: every decoding sequence gets a slot for its next position, or waits, or someone makes room."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.preemption import Reason, choose_victim, is_finishing
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import Sequence, SequenceState

Preempt = Callable[[Sequence, int, Reason], None]
"""Makes a sequence give up its blocks, of which so many are needed, for a reason."""


def grow_tables(running: RunningSet, plan: StepPlan, preempt: Preempt) -> bool:
    """Grows block tables; False when some sequence sits this step out or has been preempted.

    Blocks go to the highest priority and then to the oldest. One that gets none waits without a row if blocks in
    flight will be enough; only otherwise, because a victim's blocks come back no sooner than those, it has the
    weakest sequence preempted, itself perhaps.
    """
    needy = [s for s in running.decoding if s.num_planned >= s.horizon and not is_finishing(s)]
    if len(needy) > 1 and len(needy) > running.pool.num_allocatable:
        needy.sort(key=_strength)
    stalled: list[Sequence] = []
    everyone_ran = True
    for seq in needy:
        if seq.state is SequenceState.RUNNING and not _grow_or_make_room(running, plan, seq, stalled, preempt):
            everyone_ran = False
    return everyone_ran


def drop_appends(plan: StepPlan, running: RunningSet) -> None:
    """Takes back appends to lanes whose sequences were preempted after they had grown: the plan releases the lanes."""
    lanes = {seq.lane for seq in running}
    appends = [
        (lane, block_id)
        for lane, block_id in zip(plan.append_lanes, plan.append_block_ids, strict=True)
        if lane in lanes
    ]
    plan.append_lanes = [lane for lane, _ in appends]
    plan.append_block_ids = [block_id for _, block_id in appends]


def _grow_or_make_room(
    running: RunningSet, plan: StepPlan, seq: Sequence, stalled: list[Sequence], preempt: Preempt
) -> bool:
    """Whether the sequence has grown and nobody was preempted for it."""
    was_easy = True
    while not running.grow(seq, plan):
        was_easy = False
        num_needed = sum(map(_num_missing, [*stalled, seq])) - _num_coming(running)
        if num_needed <= 0:
            stalled.append(seq)
            break
        victim = choose_victim(running, seq.priority + 1, running.last_victim)
        assert victim is not None, "the sequence itself is a candidate"
        preempt(victim, num_needed, Reason.MEMORY)
        if victim is seq:
            break
    return was_easy


def _num_coming(running: RunningSet) -> int:
    """Blocks that will be free once the plans in flight are done, without losing anything."""
    finishing = (s.table for s in running.decoding if s.state is SequenceState.RUNNING and is_finishing(s))
    return running.num_leaving + sum(len(table.block_ids) for table in finishing if table is not None)


def _num_missing(seq: Sequence) -> int:
    return 0 if seq.table is None else seq.table.num_missing(seq.num_planned + 1)


def _strength(seq: Sequence) -> tuple[int, float, int]:
    return (-seq.priority, seq.arrival, seq.seq_id)
