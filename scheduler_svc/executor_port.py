"""The scheduler's side of its executor: hello, session, plans out, results in, and what to do when either fails.

One executor at a time. A session is one epoch; whatever goes wrong in a way that cannot be mended by sending a kept
plan again ends in a new session, in which the executor starts with empty lanes and the core plans everything anew.
Nothing here waits: each method looks at `now` and acts.

    hello ─► attach ─► SessionStart ─► plans ⇄ results ─► silent, gone, stuck: detach
                            ▲                │
                            └── new epoch ───┘ FAILED, unmendable gap, result that fits no plan
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.framing import PROTOCOL, Channel
from pagemill.links import HubLink, PeerId, SendOutcome
from pagemill.logs import STEP_ID, kv
from scheduler_svc.audit import Audit
from scheduler_svc.codec import WireError, decode_limits, decode_result, encode_plan
from scheduler_svc.config import EngineConfig
from scheduler_svc.core.events import Event
from scheduler_svc.core.plan import StepStatus
from scheduler_svc.core.preemption import Action, Reason
from scheduler_svc.core.results import ResultMismatchError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.counters import EngineCounters, RateMeter
from scheduler_svc.executor_session import ExecutorSession, SentPlan, Strangers, state_name
from scheduler_svc.explain import explain, explain_preemptions
from scheduler_svc.sessions import Clock, EpochSource, peer_name, plain, refuse_hello

log = logging.getLogger(__name__)

MAX_RESENDS = 2
"""Times kept plans are sent again for the same missing result, before a new session."""
_BACKOFF_S = (0.0, 0.1, 0.5, 2.0, 5.0)
"""Pause before planning again after that many failed sessions in a row."""


class ExecutorPort:
    """The hub for executors and the session with the one in use. Events of the core go to `emit`."""

    def __init__(
        self,
        *,
        hub: HubLink,
        core: Scheduler,
        config: EngineConfig,
        epochs: EpochSource,
        counters: EngineCounters,
        emit: Callable[[list[Event]], None],
        required_fingerprint: Callable[[], str | None],
        clock: Clock,
        audit: Audit,
    ) -> None:
        self.core = core
        self.session: ExecutorSession | None = None
        self.rate = RateMeter()
        self.absent_since = clock()
        """Since when there is no executor; meaningless while there is one."""
        self._hub = hub
        self._config = config
        self._epochs = epochs
        self._counters = counters
        self._emit = emit
        self._required_fingerprint = required_fingerprint
        self._clock = clock
        self._audit = audit
        self._strangers = Strangers(lease_s=config.lease_s, hello_timeout_s=config.hello_timeout_s, counters=counters)
        self._failures = 0
        self._preempted: dict[tuple[Action, Reason], int] = {}
        """Preemptions that the log has told of; kept up at level debug only."""

    @property
    def has_backlog(self) -> bool:
        """Whether something waits for a link that was full."""
        return self.session is not None and bool(self.session.outbox)

    @property
    def is_failing(self) -> bool:
        """Whether sessions had to be restarted since the last good result."""
        return self._failures > 0

    def tokens_per_s(self) -> float | None:
        """Measured rate of steps, before there is one the prefill rate of the hello; None when neither is known."""
        measured = self.rate.tokens_per_s()
        if measured is None and self.session is not None and self.session.hello.prefill_tokens_per_s > 0:
            return self.session.hello.prefill_tokens_per_s
        return measured

    # Frames in

    def handle(self, peer: PeerId, frame: bytes, now: float) -> None:
        """Act on one frame, whoever sent it."""
        session = self.session
        known = session is not None and session.peer == peer
        channel = session.channel if session is not None and known else Channel(pb.ExecutorEnvelope)
        envelope = channel.unpack(frame)
        if envelope is None:
            self._counters.stale.update(drop.value for drop in channel.dropped)
            channel.dropped.clear()
            return
        body = envelope.WhichOneof("body")
        if body == "hello":
            self._on_hello(peer, envelope, now)
        elif session is None or not known:
            self._strangers.note(peer, envelope, now)
        elif envelope.epoch != session.channel.epoch:  # newer than anything issued to it
            self._counters.stale["future_epoch"] += 1
        else:
            session.last_heard = now
            self._on_body(session, body, envelope, now)

    def _on_body(self, session: ExecutorSession, body: str | None, envelope: pb.ExecutorEnvelope, now: float) -> None:
        if body == "result":
            self._on_result(session, envelope.result, now)
        elif body == "heartbeat":
            session.state = envelope.heartbeat.state
        elif body == "nack":
            self._on_nack(session, envelope.nack.last_step_id, now)
        elif body == "goodbye":
            self.detach(now, f"it left: {plain(envelope.goodbye.reason)}", died=False)
        else:
            self._counters.stale["unexpected"] += 1

    # Hello and sessions

    def _on_hello(self, peer: PeerId, envelope: pb.ExecutorEnvelope, now: float) -> None:
        hello = envelope.hello
        reason = refuse_hello(hello, envelope.epoch) or self._refuse_now(peer, hello)
        try:
            limits = decode_limits(hello)
        except WireError as error:
            reason = reason or str(error)
        if reason is not None:
            log.warning("executor rejected", extra=kv(executor=peer_name(peer), reason=reason))
            self._counters.stale["rejected_hello"] += 1
            reject = Channel(pb.ExecutorEnvelope)
            reject.open(self._epochs.for_reject(envelope.epoch))
            self._hub.send(peer, reject.pack(reject=pb.Reject(reason=reason)))
            return
        if self.session is not None:
            self.detach(now, "it said hello again", died=False)
        self._strangers.forget(peer)
        session = ExecutorSession(peer, hello, limits, last_heard=now)
        self._emit(self.core.attach_executor(limits, now))
        self.session = session
        self._open(session, envelope.epoch, now)
        log.info(
            "executor attached",
            extra=kv(
                executor=peer_name(peer),
                device=plain(hello.device),
                version=plain(hello.version),
                blocks=limits.num_device_blocks,
                block_size=limits.block_size,
                max_model_len=limits.max_model_len,
                epoch=session.channel.epoch,
            ),
        )

    def _refuse_now(self, peer: PeerId, hello: pb.ExecutorHello) -> str | None:
        required = self._required_fingerprint()
        if required is not None and hello.model_fingerprint != required:
            return f"its model {hello.model_fingerprint} is not the one that the gateways serve, {required}"
        if hello.rank != 0:
            return f"rank {hello.rank} of an executor group said hello; only rank 0 speaks"
        session = self.session
        if session is None or session.peer == peer:
            return None
        probe = session.channel.pack(heartbeat=pb.Heartbeat())
        if self._send(session, probe) is SendOutcome.GONE:
            return None  # the old one is dead, and has been detached
        return f"this scheduler has an executor already ({peer_name(session.peer)}), and one is all it can use"

    def _open(self, session: ExecutorSession, above: int, now: float) -> None:
        """Begin a new epoch; the core has been attached, nothing is in flight."""
        self._counters.executor_sessions += 1
        session.channel.open(self._epochs.next(above))
        session.sent.clear()
        session.outbox.clear()
        session.num_resends = 0
        session.has_broken_lanes = False
        session.state = pb.EXECUTOR_STATE_IDLE
        session.applied_step_id = self.core.next_step_id - 1
        session.next_heartbeat = now + self._config.heartbeat_s
        start = pb.SessionStart(
            chosen_protocol=PROTOCOL,
            lease_ms=round(self._config.lease_s * 1000),
            first_step_id=self.core.next_step_id,
            pipeline_depth=self.core.config.pipeline_depth,
        )
        self._send(session, session.channel.pack(session_start=start))

    def restart(self, now: float, reason: str) -> None:
        """A new session with the same executor: all its lanes are void. Nothing without an executor."""
        session = self.session
        if session is None:
            return
        self._emit(self.core.attach_executor(session.limits, now))
        self._reopen(session, now, reason)

    def _reopen(self, session: ExecutorSession, now: float, reason: str) -> None:
        pause = _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
        self._failures += 1
        session.hold_until = now + pause
        log.warning(
            "executor session restarts", extra=kv(executor=peer_name(session.peer), reason=reason, pause_s=pause)
        )
        self._open(session, 0, now)

    def detach(self, now: float, reason: str, *, died: bool = True) -> None:
        """No executor from now on; what ran waits to be computed again, and is suspected if the executor died of it."""
        if self.session is None:
            return
        log.warning("executor detached", extra=kv(executor=peer_name(self.session.peer), reason=reason))
        self.session = None
        self.absent_since = now
        self._emit(self.core.detach_executor(now, died=died))

    # Plans and results

    def send_plans(self, now: float) -> bool:
        """Send what can be planned now; whether anything was."""
        session = self.session
        if session is None or now < session.hold_until or not self._drain_outbox(session):
            return False
        session.hold_until = 0.0
        sent_any = False
        while self.session is session and not session.outbox:
            begin = self._clock()
            plan = self.core.schedule(now)
            if plan is None:
                break
            message = encode_plan(plan)
            frame = session.channel.pack(plan=message)
            if log.isEnabledFor(logging.DEBUG):
                self._preempted = explain_preemptions(plan.step_id, self.core.stats(), self._preempted)
            self._counters.schedule_seconds.observe(self._clock() - begin)
            if session.sent:
                self._counters.plans_sent_ahead += 1
            else:
                session.progress_at = now
            num_mapped = self.core.num_mapped_blocks() if self._audit.wants_mapped_blocks() else None
            session.sent.append(SentPlan(plan.step_id, message, plan.num_tokens, plan.num_rows, now, num_mapped))
            self._counters.plans_sent += 1
            self._send(session, frame)
            sent_any = True
        return sent_any

    def _on_result(self, session: ExecutorSession, message: pb.StepResult, now: float) -> None:
        if not session.sent or message.step_id < session.sent[0].step_id:
            self._counters.stale["duplicate_result"] += 1
            return
        plan = session.sent[0]
        if message.step_id > session.sent[-1].step_id:
            self.restart(now, f"a result of step {message.step_id}, which was never sent")
            return
        if message.step_id != plan.step_id:
            self._counters.stale["result_gap"] += 1
            self._resend(session, now, f"the result of step {message.step_id} came before that of {plan.step_id}")
            return
        try:
            result = decode_result(message, session.hello.vocab_size, session.hello.max_tokens + plan.num_rows)
            events = self.core.apply(result, now)
        except (WireError, ResultMismatchError) as error:
            self.restart(now, f"a result that fits no plan: {error}")
            return
        self._close_step(session, plan, message, now)
        self._emit(events)
        if result.status is StepStatus.FAILED:  # the core has lost and attached it already
            log.error("step failed", extra=kv(**{STEP_ID: message.step_id}, executor=peer_name(session.peer)))
            self._reopen(session, now, "a step failed")
            return
        self._failures = 0
        session.has_broken_lanes |= result.status is not StepStatus.OK
        self._compare_mapped(session, plan, message.num_mapped_blocks, now)

    def _compare_mapped(self, session: ExecutorSession, plan: SentPlan, num_mapped: int, now: float) -> None:
        """Heal by a new session when the executor's tables are not what the plans made of them. 0: it does not say."""
        expected = plan.num_mapped_blocks
        if expected is None or num_mapped in (0, expected) or session.has_broken_lanes:
            return
        self._counters.violations["mapped_blocks"] += 1
        log.error(
            "executor holds other blocks than the plans gave it",
            extra=kv(**{STEP_ID: plan.step_id}, executor=peer_name(session.peer), mapped=num_mapped, expected=expected),
        )
        self.restart(now, f"{num_mapped} blocks are mapped after step {plan.step_id}, not {expected}")

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
            log.debug("step", extra=kv(**explain(plan, message, self.core.stats(), now)))
        session.sent.popleft()
        session.applied_step_id = plan.step_id
        session.progress_at = now
        session.num_resends = 0

    def _on_nack(self, session: ExecutorSession, last_step_id: int, now: float) -> None:
        if not session.sent:
            self._counters.stale["nack"] += 1
        elif session.sent[0].step_id <= last_step_id + 1 <= session.sent[-1].step_id:
            self._resend(session, now, f"it has plans up to {last_step_id} only", last_step_id + 1)
        elif last_step_id == session.sent[-1].step_id:  # sent before the resent plans arrived
            self._counters.stale["nack"] += 1
        else:
            self.restart(now, f"it has plans up to {last_step_id} only, and later ones are not kept")

    def _resend(self, session: ExecutorSession, now: float, reason: str, first: int = 0) -> None:
        """Send the plans in flight from `first` on again: an executor answers one it knows with its stored result."""
        if session.num_resends >= MAX_RESENDS:
            self.restart(now, reason)
            return
        session.num_resends += 1
        session.progress_at = now
        log.warning("plans sent again", extra=kv(executor=peer_name(session.peer), reason=reason))
        for plan in list(session.sent):
            if plan.step_id >= first and self.session is session:
                self._counters.plans_resent += 1
                self._send(session, session.channel.pack(plan=plan.message))

    # Frames out

    def _send(self, session: ExecutorSession, frame: bytes) -> SendOutcome:
        if session.outbox:
            session.outbox.append(frame)
            return SendOutcome.FULL
        outcome = self._hub.send(session.peer, frame)
        if outcome is SendOutcome.FULL:
            self._counters.executor_stalls += 1
            session.outbox.append(frame)
        elif outcome is SendOutcome.GONE and self.session is session:
            self.detach(self._clock(), "its connection is closed")
        return outcome

    def _drain_outbox(self, session: ExecutorSession) -> bool:
        """Whether nothing waits any more."""
        while session.outbox:
            outcome = self._hub.send(session.peer, session.outbox[0])
            if outcome is SendOutcome.GONE:
                self.detach(self._clock(), "its connection is closed")
            if outcome is not SendOutcome.SENT:
                return False
            session.outbox.popleft()
        return True

    # Time

    def tick(self, now: float) -> None:
        """Send heartbeats, check leases and limits. Only when no frame waits to be read does silence mean anything."""
        session = self.session
        if session is not None:
            self._check(session, now)
        if self.session is session and session is not None and now >= session.next_heartbeat:
            session.next_heartbeat = now + self._config.heartbeat_s
            if not session.outbox:
                beat = pb.Heartbeat(last_step_id=session.applied_step_id)
                self._send(session, session.channel.pack(heartbeat=beat))
        self._strangers.check(now)

    def _check(self, session: ExecutorSession, now: float) -> None:
        state = state_name(session.state)
        waited = now - session.progress_at
        if now - session.last_heard > self._config.lease_s:
            self.detach(now, f"silent for {now - session.last_heard:.1f} s, last state {state}")
        elif session.sent and waited > self._config.step_timeout_s:
            self.detach(now, f"step {session.sent[0].step_id} took more than {waited:.0f} s, last state {state}")
        elif session.sent and waited > self._config.lease_s and session.state == pb.EXECUTOR_STATE_IDLE:
            self._resend(session, now, f"idle, and no result of step {session.sent[0].step_id} for {waited:.1f} s")

    def due(self) -> float:
        """When `tick` or `send_plans` has something to do at the latest, if nothing arrives before."""
        session = self.session
        if session is None:
            return float("inf")
        return min(session.next_heartbeat, session.hold_until or float("inf"))

    def goodbye(self, reason: str) -> None:
        """A last word; no more plans will come."""
        if self.session is not None:
            self._hub.send(self.session.peer, self.session.channel.pack(goodbye=pb.Goodbye(reason=reason)))
