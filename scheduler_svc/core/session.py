"""`Session`: one executor from its hello to its loss, and who works on what it holds.

It makes plans: `plan` is the list of the phases of one. What outlives an executor (the queue, what was learned, the
counters, the suspects) is `Lasting`, which the scheduler owns and hands to each session.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_svc.blocks.residency import ResidencySampler
from scheduler_svc.core.admission import Admission
from scheduler_svc.core.batch import BatchBuilder
from scheduler_svc.core.costs import TailLosses
from scheduler_svc.core.growth import drop_appends, grow_tables
from scheduler_svc.core.limits import StepLimits
from scheduler_svc.core.params import SchedulerConfig
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.preempter import Preempter
from scheduler_svc.core.queued_hits import QueuedHits
from scheduler_svc.core.queues import WaitingQueue
from scheduler_svc.core.reserve import OutputLengths
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.stats import Counters
from scheduler_svc.core.suspects import Suspects

RESIDENCY_EVERY = 16
"""One kept block in so many is followed."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """What all sessions of a scheduler share."""

    config: SchedulerConfig
    waiting: WaitingQueue
    suspects: Suspects
    counters: Counters = field(default_factory=Counters)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    losses: TailLosses = field(default_factory=TailLosses)
    residency: ResidencySampler = field(default_factory=lambda: ResidencySampler(RESIDENCY_EVERY))


class Session:
    """Starts with empty lanes and empty tiers; `applied_step_id` is the last plan of the session before."""

    __slots__ = ("_admission", "_lasting", "hits", "preempter", "running")

    def __init__(self, limits: StepLimits, applied_step_id: int, lasting: Lasting) -> None:
        self._lasting = lasting
        self.running = RunningSet(limits, applied_step_id, lasting.residency)
        self.preempter = Preempter(self.running, lasting.waiting, lasting.counters, lasting.losses)
        self.hits = QueuedHits(self.running.memory.prefix, lasting.waiting)
        self._admission = Admission(
            lasting.config,
            lasting.waiting,
            self.running,
            lengths=lasting.lengths,
            counters=lasting.counters,
            losses=lasting.losses,
            preempt=self.preempter.preempt,
            suspects=lasting.suspects,
        )

    def plan(self, step_id: int, now: float) -> StepPlan | None:
        """The next plan, whose result is then expected; None where there is nothing to tell the executor."""
        running, admission = self.running, self._admission
        running.memory.now = now
        self.hits.go_on()
        running.sweep()
        plan = StepPlan(step_id)
        everyone_ran = grow_tables(running, plan, self.preempter.preempt)
        admission.make_room(now)
        if running.sweep():
            drop_appends(plan, running)
        batch = BatchBuilder(running, plan)
        batch.add_decodes()
        batch.add_chunks(at_least=self._lasting.waiting.top_priority)
        if everyone_ran:
            admission.admit(plan, batch.num_tokens_left, now)
        batch.add_chunks(at_least=None)
        running.memory.catch_up()
        if not batch.rows and not plan.admit and not _is_report_wanted(running):
            return None
        self._close(plan, batch)
        return plan

    def _close(self, plan: StepPlan, batch: BatchBuilder) -> None:
        """The plan is final: its releases and copies are held, its result is expected."""
        running, counters = self.running, self._lasting.counters
        plan.release_lanes = running.fences.take_releases(plan.step_id)
        running.memory.copies.write(plan)
        running.inflight.append(batch.close())
        counters.plans += 1
        counters.prefill_tokens += batch.num_prefill_tokens


def _is_report_wanted(running: RunningSet) -> bool:
    """Whether an empty plan is to be sent, because only its result tells that lanes or copies are done."""
    return not running.inflight and (running.fences.has_releases or not running.memory.copies.is_idle)
