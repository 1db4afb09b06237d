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
    growth = _Growth(running, plan, preempt)
    everyone_ran = True
    for seq in needy:
        if seq.state is SequenceState.RUNNING and not growth.grow_or_make_room(seq):
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


class _Growth:
    """One plan's growing: how many blocks are on their way, and how many of them are spoken for."""

    def __init__(self, running: RunningSet, plan: StepPlan, preempt: Preempt) -> None:
        self._running = running
        self._plan = plan
        self._preempt = preempt
        self._num_coming: int | None = None
        self._num_stalled = 0

    def grow_or_make_room(self, seq: Sequence) -> bool:
        """Whether the sequence has grown and nobody was preempted for it."""
        was_easy = True
        while not self._running.grow(seq, self._plan):
            was_easy = False
            if self._num_coming is None:
                self._num_coming = _num_coming(self._running)
            num_needed = self._num_stalled + _num_missing(seq) - self._num_coming
            if num_needed <= 0:
                self._num_stalled += _num_missing(seq)
                break
            victim = choose_victim(self._running, seq.priority + 1, self._running.last_victim)
            assert victim is not None, "the sequence itself is a candidate"
            self._preempt(victim, num_needed, Reason.MEMORY)
            self._num_coming = None
            if victim is seq:
                break
        return was_easy


def _num_coming(running: RunningSet) -> int:
    """Blocks that will be free once the plans in flight are done, without losing anything."""
    finishing = [s for s in running.decoding if s.state is SequenceState.RUNNING and is_finishing(s)]
    return running.num_leaving + sum(seq.num_brought for seq in finishing)


def _num_missing(seq: Sequence) -> int:
    return 0 if seq.table is None else seq.table.num_missing(seq.num_planned + 1)


def _strength(seq: Sequence) -> tuple[int, float, int]:
    return (-seq.priority, seq.arrival, seq.seq_id)
