"""Who starts next. Called by `schedule` once the running sequences have their rows.

A sequence starts when there is a seat, a lane and blocks for all its known tokens, leaving the watermark free, so that
those who run can grow. When the next one in order does not fit now, up to `max_skip_ahead` others may start past it;
after that many it goes in front of its priority and admission waits for it. Nobody passes a sequence in front:
preempted ones are there, and letting others take the room that a preemption made would preempt again.

A sequence whose next block another one is computing right now is set aside until it is there, and holds up nobody.

Beyond the watermark, admission leaves what the running sequences are expected to grow by (`outlook`): a short request
finds its place between long ones, and those rarely have to make room for what was admitted after them.

A sequence of strictly higher priority than some that run need not wait for them: they make room if that suffices.
"""

from __future__ import annotations

from scheduler_svc.core.accounting import count_start
from scheduler_svc.core.costs import TailLosses
from scheduler_svc.core.growth import Preempt
from scheduler_svc.core.outlook import Outlook
from scheduler_svc.core.params import SchedulerConfig
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.preemption import Reason, is_finishing, is_immune
from scheduler_svc.core.queues import WaitingQueue
from scheduler_svc.core.reserve import OutputLengths
from scheduler_svc.core.running import Need, RunningSet
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import Counters
from scheduler_svc.core.suspects import Suspects

MAX_SET_ASIDE = 1024
"""Sequences looked at in one plan beside those that start: one that waits for a prefix costs a microsecond."""
MAX_TOKENS_SENT = 262_144
"""Known tokens of the sequences that one plan admits, from which it admits no more: their ids are copied and sent."""
MAX_CONSIDERED = 16
"""Sequences for which one plan may make room."""


class Admission:
    """Moves sequences from the waiting queue to one running set, for one plan."""

    __slots__ = (
        "_counters",
        "_growth_reserve",
        "_lengths",
        "_losses",
        "_max_skip_ahead",
        "_preempt",
        "_running",
        "_suspects",
        "_waiting",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        running: RunningSet,
        *,
        lengths: OutputLengths,
        counters: Counters,
        losses: TailLosses,
        preempt: Preempt,
        suspects: Suspects,
    ) -> None:
        self._max_skip_ahead = config.max_skip_ahead
        self._growth_reserve = config.growth_reserve
        self._waiting = waiting
        self._running = running
        self._lengths = lengths
        self._counters = counters
        self._losses = losses
        self._preempt = preempt
        self._suspects = suspects

    def make_room(self, now: float) -> None:
        """Preempts sequences of lower priority for those that can then start, now or once fences pass.

        Before the batch is built, so that no victim has a row in the plan that releases its lane. Nobody is preempted
        when it would not be enough, and blocks in flight already count, so waiting for them preempts nobody twice.
        """
        if not self._next_outranks():
            return
        waiting, running = self._waiting, self._running
        num_seats = running.limits.max_seqs - running.num_running
        num_blocks = running.pool.num_allocatable + running.num_leaving - running.limits.watermark_blocks
        outlook = Outlook(running, self._lengths, self._growth_reserve)
        considered: list[Sequence] = []
        while self._next_outranks() and len(considered) < MAX_CONSIDERED:
            seq = waiting.pop(now)
            assert seq is not None
            considered.append(seq)
            if self._is_held(seq):
                continue
            need = running.need(seq)
            if need.should_wait or not outlook.has_room_for(seq, need):
                continue
            needed = need.num_taken + need.num_reserved
            victims = self._victims(seq.priority, num_seats, needed - num_blocks)
            if victims is None:
                break
            num_seats += len(victims) - 1
            seq.in_front = seq.in_front or bool(victims)
            for victim in victims:
                num_missing = max(0, needed - num_blocks)
                num_blocks += _num_held(running, victim)
                self._preempt(victim, num_missing, Reason.PRIORITY)
            num_blocks -= needed
        waiting.put_back(considered)

    def admit(self, plan: StepPlan, num_tokens: int, now: float) -> None:
        """Starts sequences whose first chunks fit into `num_tokens`, writing their admissions into the plan."""
        waiting, running = self._waiting, self._running
        outlook = Outlook(running, self._lengths, self._growth_reserve)
        popped: list[Sequence] = []
        passed: list[Sequence] = []
        num_sent = 0
        while num_tokens > 0 and num_sent < MAX_TOKENS_SENT and self._has_room() and len(popped) < MAX_SET_ASIDE:
            seq = waiting.pop(now)
            if seq is None:
                break
            if self._is_held(seq):
                popped.append(seq)  # even in front, it holds up nobody
                continue
            need = running.need(seq)
            if need.should_wait:
                popped.append(seq)
                continue
            if not self._fits(seq, need, outlook):
                popped.append(seq)
                passed.append(seq)
                if seq.in_front or max(seq.num_skipped, len(passed) - 1) >= self._max_skip_ahead:
                    break
                continue
            count_start(self._counters, self._losses, seq, need, running.limits)
            plan.admit.append(running.start(seq, need, plan.step_id, now))
            num_sent += len(seq.token_ids)
            outlook.started(seq)
            self._suspects.started(seq)
            waiting.admitted(seq)
            if not need.host_ids:
                num_tokens -= min(seq.prefill_len - need.num_cached, running.limits.max_chunk)
            for other in passed:
                other.num_skipped += 1
            if any(other.num_skipped >= self._max_skip_ahead for other in passed):
                break
        for seq in passed:
            seq.in_front = seq.in_front or seq.num_skipped >= self._max_skip_ahead
        waiting.put_back(popped)

    def _is_held(self, seq: Sequence) -> bool:
        """Whether it waits for another one's probation or prefix, as far as that shows at once."""
        return self._suspects.must_wait(seq) or self._running.memory.prefix.must_wait(seq)

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

    def _fits(self, seq: Sequence, need: Need, outlook: Outlook) -> bool:
        running = self._running
        return (
            running.is_settled(seq)
            and (seq.stash is None or seq.stash.transfer.is_done)
            and running.num_running < running.limits.max_seqs
            and running.lanes.num_free > 0
            and need.num_taken + need.num_reserved + self._watermark() <= running.pool.num_allocatable
            and outlook.has_room_for(seq, need)
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
            num_missing -= _num_held(self._running, victim)
            if num_missing <= 0:
                return victims
        return None


def _num_held(running: RunningSet, seq: Sequence) -> int:
    """Blocks that come back when the sequence goes: those that nobody else uses, and what it has reserved."""
    assert seq.table is not None
    num_refs = running.pool.num_refs
    return seq.num_reserved + sum(1 for block_id in seq.table.block_ids if num_refs(block_id) == 1)


def _weakness(seq: Sequence) -> tuple[int, float, int, int]:
    return (seq.priority, -seq.arrival, seq.num_planned, -seq.seq_id)
