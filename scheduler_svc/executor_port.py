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
from pagemill.logs import kv
from scheduler_svc.audit import Audit
from scheduler_svc.config import EngineConfig
from scheduler_svc.core.events import Event
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.counters import EngineCounters
from scheduler_svc.executor_codec import decode_limits
from scheduler_svc.executor_session import ExecutorSession, Loss, Strangers, state_name
from scheduler_svc.plan_flow import PlanFlow
from scheduler_svc.rates import ExecutorRates
from scheduler_svc.sessions import Clock, EpochSource, peer_name, plain, refuse_hello
from scheduler_svc.wire_checks import WireError

log = logging.getLogger(__name__)

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
        self._lost: ExecutorSession | None = None
        """The one before, if it is open whether it died; decided by who comes next."""
        self.absent_since = clock()
        """Since when there is no executor; meaningless while there is one."""
        self._hub = hub
        self._config = config
        self._epochs = epochs
        self._counters = counters
        self._emit = emit
        self._required_fingerprint = required_fingerprint
        self._clock = clock
        self._strangers = Strangers(lease_s=config.lease_s, hello_timeout_s=config.hello_timeout_s, counters=counters)
        self._failures = 0
        self._plans = PlanFlow(self, hub=hub, counters=counters, emit=emit, clock=clock, audit=audit)

    @property
    def has_backlog(self) -> bool:
        """Whether something waits for a link that was full."""
        return self.session is not None and bool(self.session.outbox)

    @property
    def is_failing(self) -> bool:
        """Whether sessions had to be restarted since the last good result."""
        return self._failures > 0

    def tokens_per_s(self) -> float | None:
        """Measured rate of steps, before there is one the executor's prefill rate; None when neither is known."""
        measured = self._plans.rate.tokens_per_s()
        if measured is None and self.session is not None and self.session.limits.prefill_tokens_per_s > 0:
            return self.session.limits.prefill_tokens_per_s
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
            self._plans.on_result(session, envelope.result, now)
        elif body == "heartbeat":
            session.state = envelope.heartbeat.state
        elif body == "nack":
            self._plans.on_nack(session, envelope.nack.last_step_id, now)
        elif body == "goodbye":
            self.detach(now, f"it left: {plain(envelope.goodbye.reason)}", Loss.LEFT)
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
            self._reject(peer, envelope.epoch, reason)
            return
        if self.session is not None:
            self.detach(now, "it said hello again", Loss.LEFT)
        self._strangers.forget(peer)
        rates = ExecutorRates(limits, self.core.config.max_num_batched_tokens)
        session = ExecutorSession(peer, hello, rates, last_heard=now)
        died = self._lost is not None and (self._lost.is_stuck or not self._lost.is_of(peer, hello))
        try:
            events = self.core.attach_executor(limits, now, predecessor_died=died)
        except Exception as error:  # it must hear that nothing will come, whatever went wrong here
            text = str(error) if isinstance(error, ValueError) else type(error).__name__
            self._reject(peer, envelope.epoch, f"this scheduler cannot use it: {text}")
            raise
        self._emit(events)
        self._lost = None
        self.session = session
        self._open(session, envelope.epoch, now)
        log.info(
            "executor attached",
            extra=kv(
                executor=peer_name(peer),
                predecessor_died=died,
                device=plain(hello.device),
                version=plain(hello.version),
                blocks=limits.num_device_blocks,
                block_size=limits.block_size,
                max_model_len=limits.max_model_len,
                epoch=session.channel.epoch,
            ),
        )

    def _reject(self, peer: PeerId, epoch: int, reason: str) -> None:
        log.warning("executor rejected", extra=kv(executor=peer_name(peer), reason=reason))
        self._counters.stale["rejected_hello"] += 1
        reject = Channel(pb.ExecutorEnvelope)
        reject.open(self._epochs.for_reject(epoch))
        self._hub.send(peer, reject.pack(reject=pb.Reject(reason=reason)))

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
        if self._plans.send(session, probe) is SendOutcome.GONE:
            return None  # the old one is dead, and has been detached
        return f"this scheduler has an executor already ({peer_name(session.peer)}), and one is all it can use"

    def _open(self, session: ExecutorSession, above: int, now: float) -> None:
        """Begin a new epoch; the core has been attached, nothing is in flight."""
        self._counters.executor_sessions += 1
        session.channel.open(self._epochs.next(above))
        session.sent.clear()
        session.outbox.clear()
        session.copies.clear()
        session.num_resends = 0
        session.state_digest = None
        session.state = pb.EXECUTOR_STATE_IDLE
        session.applied_step_id = self.core.next_step_id - 1
        session.next_heartbeat = now + self._config.heartbeat_s
        start = pb.SessionStart(
            chosen_protocol=PROTOCOL,
            lease_ms=round(self._config.lease_s * 1000),
            first_step_id=self.core.next_step_id,
            pipeline_depth=self.core.config.pipeline_depth,
        )
        self._plans.send(session, session.channel.pack(session_start=start))

    def restart(self, now: float, reason: str) -> None:
        """A new session with the same executor: all its lanes are void. Nothing without an executor."""
        session = self.session
        if session is None:
            return
        self._emit(self.core.attach_executor(session.limits, now))
        self.reopen(session, now, reason)

    def reopen(self, session: ExecutorSession, now: float, reason: str) -> None:
        """As `SessionOwner.reopen`: after a pause that grows with the failures in a row."""
        pause = _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
        self._failures += 1
        session.hold_until = now + pause
        log.warning(
            "executor session restarts", extra=kv(executor=peer_name(session.peer), reason=reason, pause_s=pause)
        )
        self._open(session, 0, now)

    def detach(self, now: float, reason: str, loss: Loss = Loss.LOST) -> None:
        """No executor from now on; what ran waits to be computed again.

        Nobody is suspected yet: a connection that breaks and a silence may be a stall, of either side. Who says hello
        next shows whether it was a death.
        """
        session = self.session
        if session is None:
            return
        log.warning("executor detached", extra=kv(executor=peer_name(session.peer), reason=reason))
        session.is_stuck = loss is Loss.STUCK
        self._lost = None if loss is Loss.LEFT else session
        self.session = None
        self.absent_since = now
        self._emit(self.core.detach_executor(now))

    def is_one_starting(self, now: float) -> bool:
        """Whether an executor that has no session yet says that it is loading."""
        return self._strangers.is_one_starting(now)

    def has_worked(self) -> None:
        """As `SessionOwner.has_worked`."""
        self._failures = 0

    def send_plans(self, now: float) -> bool:
        """As `PlanFlow.send_plans`."""
        return self._plans.send_plans(now)

    # Time

    def tick(self, now: float, paused_s: float = 0.0) -> None:
        """Send heartbeats, check leases and limits. Only when no frame waits to be read does silence mean anything.

        `paused_s` is how long this loop stood still since the last call: so much of a silence is its own.
        """
        session = self.session
        if session is not None:
            session.last_heard = min(now, session.last_heard + paused_s)
            session.progress_at = min(now, session.progress_at + paused_s)
            self._check(session, now)
        if self.session is session and session is not None and now >= session.next_heartbeat:
            session.next_heartbeat = now + self._config.heartbeat_s
            if not session.outbox:
                beat = pb.Heartbeat(last_step_id=session.applied_step_id)
                self._plans.send(session, session.channel.pack(heartbeat=beat))
        self._strangers.check(now)

    def _check(self, session: ExecutorSession, now: float) -> None:
        state = state_name(session.state)
        waited = now - session.progress_at
        if now - session.last_heard > self._config.lease_s:
            self.detach(now, f"silent for {now - session.last_heard:.1f} s, last state {state}")
        elif session.sent and waited > self._config.step_timeout_s:
            reason = f"step {session.sent[0].step_id} took more than {waited:.0f} s, last state {state}"
            self.detach(now, reason, Loss.STUCK)
        elif session.sent and waited > self._config.lease_s and session.state == pb.EXECUTOR_STATE_IDLE:
            self._plans.resend(
                session, now, f"idle, and no result of step {session.sent[0].step_id} for {waited:.1f} s"
            )

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
