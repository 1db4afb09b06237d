"""Who starts next. Called by `schedule` once the running sequences have their rows.

A sequence starts when there is a seat, a lane and blocks for all its known tokens, leaving the watermark free, so that
those who run can grow. When the next one in order does not fit now, up to `max_skip_ahead` others may start past it;
after that many it goes in front of its priority and admission waits for it. Nobody passes a sequence in front:
preempted ones are there, and letting others take the room that a preemption made would preempt again.

A sequence of strictly higher priority than some that run need not wait for them: they make room if that suffices.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.params import SchedulerConfig
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.preemption import is_finishing, is_immune
from scheduler_svc.core.queues import WaitingQueue
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import Sequence


class Admission:
    """Moves sequences from the waiting queue to one running set, for one plan."""

    __slots__ = ("_max_skip_ahead", "_preempt", "_running", "_waiting")

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        running: RunningSet,
        preempt: Callable[[Sequence], None],
    ) -> None:
        self._max_skip_ahead = config.max_skip_ahead
        self._waiting = waiting
        self._running = running
        self._preempt = preempt

    def make_room(self, now: float) -> None:
        """Preempts sequences of lower priority for those that can then start, now or once fences pass.

        Before the batch is built, so that no victim has a row in the plan that releases its lane. Nobody is preempted
        when it would not be enough, and blocks in flight already count, so waiting for them preempts nobody twice.
        """
        waiting, running = self._waiting, self._running
        num_seats = running.limits.max_seqs - running.num_running
        num_blocks = running.pool.num_allocatable + running.pool.num_in_flight - running.limits.watermark_blocks
        considered: list[Sequence] = []
        while self._next_outranks():
            seq = waiting.pop(now)
            assert seq is not None
            considered.append(seq)
            needed = sum(running.blocks_to_start(seq))
            victims = self._victims(seq.priority, num_seats, needed - num_blocks)
            if victims is None:
                break
            num_seats += len(victims) - 1
            num_blocks += sum(map(_num_held, victims)) - needed
            seq.in_front = seq.in_front or bool(victims)
            for victim in victims:
                self._preempt(victim)
        for seq in reversed(considered):
            waiting.put_back(seq)

    def admit(self, plan: StepPlan, num_tokens: int, now: float) -> None:
        """Starts sequences whose first chunks fit into `num_tokens`, writing their admissions into the plan."""
        waiting, running = self._waiting, self._running
        passed: list[Sequence] = []
        while num_tokens > 0 and self._has_room():
            seq = waiting.pop(now)
            if seq is None:
                break
            if not self._fits(seq):
                passed.append(seq)
                if seq.in_front or max(seq.num_skipped, len(passed) - 1) >= self._max_skip_ahead:
                    break
                continue
            plan.admit.append(running.start(seq, plan.step_id, now))
            waiting.admitted(seq)
            num_tokens -= min(seq.prefill_len, running.limits.max_chunk)
            for other in passed:
                other.num_skipped += 1
            if any(other.num_skipped >= self._max_skip_ahead for other in passed):
                break
        for seq in reversed(passed):
            seq.in_front = seq.in_front or seq.num_skipped >= self._max_skip_ahead
            waiting.put_back(seq)

    def _has_room(self) -> bool:
        """Whether the smallest sequence could start; a cheap no for the steps of a full executor."""
        running = self._running
        return (
            running.num_running < running.limits.max_seqs
            and running.lanes.num_free > 0
            and running.pool.num_allocatable > self._watermark()
        )

    def _watermark(self) -> int:
        return self._running.limits.watermark_blocks if self._running.num_running else 0

    def _fits(self, seq: Sequence) -> bool:
        running = self._running
        return (
            running.is_settled(seq)
            and running.num_running < running.limits.max_seqs
            and running.lanes.num_free > 0
            and sum(running.blocks_to_start(seq)) + self._watermark() <= running.pool.num_allocatable
        )

    def _next_outranks(self) -> bool:
        """Whether the next one to start has a higher priority than some that run."""
        top, lowest = self._waiting.top_priority, self._running.lowest_priority
        return top is not None and lowest is not None and top > lowest

    def _victims(self, below: int, num_seats: int, num_missing: int) -> list[Sequence] | None:
        """The weakest of less than that priority that free a seat and the missing blocks; None: not enough."""
        victims: list[Sequence] = []
        if num_seats > 0 and num_missing <= 0:
            return victims
        candidates = [s for s in self._running if s.priority < below and not is_immune(s) and not is_finishing(s)]
        for victim in sorted(candidates, key=_weakness):
            victims.append(victim)
            num_missing -= _num_held(victim)
            if num_missing <= 0:
                return victims
        return None


def _num_held(seq: Sequence) -> int:
    return seq.num_reserved + (0 if seq.table is None else len(seq.table.block_ids))


def _weakness(seq: Sequence) -> tuple[int, float, int, int]:
    return (seq.priority, -seq.arrival, seq.num_planned, -seq.seq_id)
