"""Plans out, results in, for the session in use: what is in flight, what is sent again, and whether a result fits.

What cannot be mended by sending a kept plan again is for the owner of the session to end: `executor_port`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.links import HubLink, SendOutcome
from pagemill.logs import STEP_ID, kv
from scheduler_svc.audit import Audit
from scheduler_svc.core.events import Event
from scheduler_svc.core.plan import StepStatus
from scheduler_svc.core.preemption import Action, Reason
from scheduler_svc.core.results import ResultMismatchError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.counters import EngineCounters, RateMeter
from scheduler_svc.executor_codec import decode_result, encode_plan
from scheduler_svc.executor_session import ExecutorSession, SentPlan
from scheduler_svc.explain import explain, explain_preemptions
from scheduler_svc.rates import CopiedBytes
from scheduler_svc.sessions import Clock, peer_name
from scheduler_svc.wire_checks import WireError

log = logging.getLogger(__name__)

MAX_RESENDS = 2
"""Times kept plans are sent again for the same missing result, before a new session."""


class SessionOwner(Protocol):
    """Who begins and ends sessions."""

    core: Scheduler
    session: ExecutorSession | None

    def restart(self, now: float, reason: str) -> None:
        """Void the session and begin another with the same executor."""
        ...

    def reopen(self, session: ExecutorSession, now: float, reason: str) -> None:
        """As `restart`, when the core has lost and attached the executor already."""
        ...

    def detach(self, now: float, reason: str) -> None:
        """The executor is gone."""
        ...

    def has_worked(self) -> None:
        """A good result came."""
        ...


class PlanFlow:
    """The plans and results of one owner's sessions, one session at a time. Events of the core go to `emit`."""

    def __init__(
        self,
        owner: SessionOwner,
        *,
        hub: HubLink,
        counters: EngineCounters,
        emit: Callable[[list[Event]], None],
        clock: Clock,
        audit: Audit,
    ) -> None:
        self.rate = RateMeter()
        self._owner = owner
        self._hub = hub
        self._counters = counters
        self._emit = emit
        self._clock = clock
        self._audit = audit
        self._preempted: dict[tuple[Action, Reason], int] = {}
        """Preemptions that the log has told of; kept up at level debug only."""

    def send_plans(self, now: float) -> bool:
        """Send what can be planned now; whether anything was."""
        session = self._owner.session
        if session is None or now < session.hold_until or not self.drain_outbox(session):
            return False
        session.hold_until = 0.0
        core, sent_any = self._owner.core, False
        while self._owner.session is session and not session.outbox:
            begin = self._clock()
            plan = core.schedule(now)
            if plan is None:
                break
            message = encode_plan(plan, session.state_digest)
            frame = session.channel.pack(plan=message)
            if log.isEnabledFor(logging.DEBUG):
                self._preempted = explain_preemptions(plan.step_id, core.stats(), self._preempted)
            self._counters.schedule_seconds.observe(self._clock() - begin)
            if session.sent:
                self._counters.plans_sent_ahead += 1
            else:
                session.progress_at = now
            session.state_digest = core.state_digest() if self._audit.wants_digest(core) else None
            session.sent.append(
                SentPlan(plan.step_id, message, plan.num_tokens, plan.num_rows, now, plan.row_num_tokens)
            )
            if plan.swap_out_src or plan.swap_in_src:
                size = session.limits.bytes_per_block
                session.copies[plan.step_id] = CopiedBytes(len(plan.swap_out_src) * size, len(plan.swap_in_src) * size)
            self._counters.plans_sent += 1
            self.send(session, frame)
            sent_any = True
        return sent_any

    def on_result(self, session: ExecutorSession, message: pb.StepResult, now: float) -> None:
        """Apply one result, if it is the oldest plan's; resend or end the session for one that cannot be."""
        if not session.sent or message.step_id < session.sent[0].step_id:
            self._counters.stale["duplicate_result"] += 1
            return
        plan = session.sent[0]
        if message.step_id > session.sent[-1].step_id:
            self._owner.restart(now, f"a result of step {message.step_id}, which was never sent")
            return
        if message.step_id != plan.step_id:
            self._counters.stale["result_gap"] += 1
            self.resend(session, now, f"the result of step {message.step_id} came before that of {plan.step_id}")
            return
        if message.HasField("state_digest"):
            self._heal(session, plan, message.state_digest, now)
            return
        try:
            result = decode_result(message, session.hello.vocab_size, session.hello.max_tokens + plan.num_rows)
            events = self._owner.core.apply(result, now)
        except (WireError, ResultMismatchError) as error:
            self._owner.restart(now, f"a result that fits no plan: {error}")
            return
        self._close_step(session, plan, message, now)
        self._emit(events)
        if result.status is StepStatus.FAILED:  # the core has lost and attached it already
            log.error("step failed", extra=kv(**{STEP_ID: message.step_id}, executor=peer_name(session.peer)))
            self._owner.reopen(session, now, "a step failed")
            return
        self._learn(session, plan, message, result.status)
        self._owner.has_worked()

    def _learn(self, session: ExecutorSession, plan: SentPlan, message: pb.StepResult, status: StepStatus) -> None:
        """Count what was copied, and let the core know when the executor turns out faster or slower than it said."""
        is_alone = all(step_id > plan.step_id for step_id in session.copies)
        done = CopiedBytes.total(
            copied
            for step_id in message.finished_copy_steps
            if (copied := session.copies.pop(step_id, None)) is not None
        )
        self._counters.swapped_bytes["out"] += done.out
        self._counters.swapped_bytes["in"] += done.back
        session.rates.copies(done, message.copy_us / 1e6)
        if is_alone and status is StepStatus.OK:
            session.rates.step(plan.num_rows, plan.row_num_tokens, message.execute_us / 1e6)
        news = session.rates.take_news()
        if news is not None:
            self._owner.core.update_rates(news)

    def _heal(self, session: ExecutorSession, plan: SentPlan, digest: int, now: float) -> None:
        """A new session: the executor's lanes are not what the plans made of them, and it has not run this one."""
        self._counters.violations["state_digest"] += 1
        log.error(
            "executor holds other lanes than the plans gave it",
            extra=kv(
                **{STEP_ID: plan.step_id},
                executor=peer_name(session.peer),
                digest=digest,
                expected=plan.message.state_digest,
            ),
        )
        self._owner.restart(now, f"its lanes before step {plan.step_id} are not those it was given")

    def _close_step(self, session: ExecutorSession, plan: SentPlan, message: pb.StepResult, now: float) -> None:
        counters = self._counters
        execute_s = message.execute_us / 1e6
        counters.execute_seconds.observe(execute_s)
        if message.copy_us:
            counters.swap_seconds.observe(message.copy_us / 1e6)
        counters.wire_seconds.observe(max(0.0, now - plan.sent_at - message.wait_us / 1e6 - execute_s))
        counters.step_tokens.observe(plan.num_tokens)
        counters.step_rows.observe(plan.num_rows)
        if plan.num_tokens:
            self.rate.add(plan.num_tokens, max(1e-6, now - max(plan.sent_at, session.progress_at)))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("step", extra=kv(**explain(plan, message, self._owner.core.stats(), now)))
        session.sent.popleft()
        session.applied_step_id = plan.step_id
        session.progress_at = now
        session.num_resends = 0

    def on_nack(self, session: ExecutorSession, last_step_id: int, now: float) -> None:
        """Send what the executor says it lacks, if it is still kept."""
        if not session.sent:
            self._counters.stale["nack"] += 1
        elif session.sent[0].step_id <= last_step_id + 1 <= session.sent[-1].step_id:
            self.resend(session, now, f"it has plans up to {last_step_id} only", last_step_id + 1)
        elif last_step_id == session.sent[-1].step_id:  # sent before the resent plans arrived
            self._counters.stale["nack"] += 1
        else:
            self._owner.restart(now, f"it has plans up to {last_step_id} only, and later ones are not kept")

    def resend(self, session: ExecutorSession, now: float, reason: str, first: int = 0) -> None:
        """Send the plans in flight from `first` on again: an executor answers one it knows with its stored result."""
        if session.num_resends >= MAX_RESENDS:
            self._owner.restart(now, reason)
            return
        session.num_resends += 1
        session.progress_at = now
        log.warning("plans sent again", extra=kv(executor=peer_name(session.peer), reason=reason))
        for plan in list(session.sent):
            if plan.step_id >= first and self._owner.session is session:
                self._counters.plans_resent += 1
                self.send(session, session.channel.pack(plan=plan.message))

    # Frames out

    def send(self, session: ExecutorSession, frame: bytes) -> SendOutcome:
        """Send behind what waits; FULL when it waits now too, GONE when the executor was detached for it."""
        if session.outbox:
            session.outbox.append(frame)
            return SendOutcome.FULL
        outcome = self._hub.send(session.peer, frame)
        if outcome is SendOutcome.FULL:
            self._counters.executor_stalls += 1
            session.outbox.append(frame)
        elif outcome is SendOutcome.GONE and self._owner.session is session:
            self._owner.detach(self._clock(), "its connection is closed")
        return outcome

    def drain_outbox(self, session: ExecutorSession) -> bool:
        """Whether nothing waits any more."""
        while session.outbox:
            outcome = self._hub.send(session.peer, session.outbox[0])
            if outcome is SendOutcome.GONE:
                self._owner.detach(self._clock(), "its connection is closed")
            if outcome is not SendOutcome.SENT:
                return False
            session.outbox.popleft()
        return True
