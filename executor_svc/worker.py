"""The executor's main loop: owns the link, keeps the session alive, hands plans to the compute thread.

The main thread never computes, so a long step or a slow disk does not stop its heartbeats; the compute thread never
does I/O. A session is: hello → SessionStart → plans and results → lost (the scheduler is silent for longer than the
lease, says goodbye, or starts a newer epoch) → hello again. Weights stay; lanes do not survive a session.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from executor_svc.codec import decode_plan, encode_result
from executor_svc.compute import ComputeThread, Work
from executor_svc.metrics import ExecutorMetrics
from executor_svc.plans import PlanError, PlanLimits
from executor_svc.session import PlanWindow, Session, Verdict
from executor_svc.step import StepExecutor
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.framing import PROTOCOL, Channel
from pagemill.links import PeerLink, SendOutcome
from pagemill.logs import kv
from pagemill.wake import WakePipe
from pagemill.zmq_links import Waiter

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
_HELLO_RETRY_S = 1.0
_REJECT_RETRY_S = 5.0
_RETRY_SEND_S = 0.01
_SPARE_PLANS = 4
"""Plans taken beyond the pipeline depth before a plan is refused as a gap; the scheduler then resends it."""
_MAX_PIPELINE = 64
_MAX_OUTBOX = 128
_LINGER_S = 1.0


class Exit(Enum):
    """Why `Worker.run` returned."""

    STOPPED = 0
    FAILED = 1


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The few numbers the loop needs."""

    lease_s: float = 2.0
    """Until a SessionStart names another."""
    exit_after_reject: bool = True


class Worker:
    """Runs until stopped or refused. `stop` may be called from a signal handler or another thread."""

    def __init__(
        self,
        link: PeerLink,
        hello: pb.ExecutorHello,
        executor: StepExecutor,
        limits: PlanLimits,
        *,
        metrics: ExecutorMetrics,
        compute: ComputeThread | None = None,
        options: WorkerOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._hello = hello
        self._limits = limits
        self._metrics = metrics
        self._options = options or WorkerOptions()
        self._clock = clock
        self._channel = Channel(pb.ExecutorEnvelope)
        self._wake = WakePipe()
        self._compute = compute or ComputeThread()
        self._compute.attach(executor, self._wake.set)
        self._session: Session | None = None
        self._outbox: deque[bytes] = deque()
        self._next_hello = 0.0
        self._next_heartbeat = 0.0
        self._last_heard = 0.0
        self._stopping = False
        self._exit: Exit | None = None

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    def stop(self) -> None:
        """Finish the running step, take leave, return from `run`."""
        self._stopping = True
        self._compute.begin(0)  # at once: a plan that waits must not start because the loop comes to it late
        self._wake.set()

    def run(self) -> Exit:
        """Serve until stopped, refused or broken."""
        self._compute.start()
        waiter = Waiter([self._link], [self._wake.fd])
        while self._exit is None:
            busy = self._receive()
            busy |= self._collect()
            now = self._clock()
            self._keep_session(now)
            self._flush()
            self._check_end()
            if not busy and self._exit is None:
                waiter.wait(self._sleep_s(now))
                self._wake.clear()
        return self._close()

    def _sleep_s(self, now: float) -> float:
        if self._outbox:
            return _RETRY_SEND_S
        due = self._next_heartbeat if self._session is not None else self._next_hello
        return min(max(0.0, due - now), HEARTBEAT_S)

    def _check_end(self) -> None:
        if not self._compute.alive:
            log.error("compute thread ended")
            self._exit = Exit.FAILED
        elif self._stopping:
            self._compute.begin(0)  # what waits is skipped; what runs may finish
            if self._compute.running_step is None and not self._collect():
                self._exit = Exit.STOPPED

    def _close(self) -> Exit:
        exit_ = self._exit or Exit.FAILED
        if self._session is not None:
            reason = "stopped" if exit_ is Exit.STOPPED else "failed"
            self._post(goodbye=pb.Goodbye(reason=reason))
            self._flush()
        log.info("executor ends", extra=kv(exit=exit_.name.lower()))
        if self._compute.alive:
            self._compute.stop(timeout_s=_LINGER_S)
        self._link.close(_LINGER_S)
        self._wake.close()
        return exit_

    # Out

    def _post(self, **body: object) -> None:
        """Queue one message for the scheduler; beyond the bound it is dropped (the session is as good as lost)."""
        if len(self._outbox) < _MAX_OUTBOX:
            self._outbox.append(self._channel.pack(**body))

    def _flush(self) -> None:
        while self._outbox and self._link.send(self._outbox[0]) is SendOutcome.SENT:
            self._outbox.popleft()

    def _collect(self) -> bool:
        """Send the results that are there."""
        found = False
        while (done := self._compute.take()) is not None:
            found = True
            work, outcome = done.work, done.outcome
            self._metrics.step(outcome, num_rows=work.num_rows, num_tokens=work.num_tokens)
            if self._session is None or self._session.epoch != work.epoch:
                self._metrics.stale("result_of_old_epoch")
                continue
            result = encode_result(outcome)
            self._session.window.store(result)
            self._post(result=result)
        if found:
            self._flush()
        return found

    def _keep_session(self, now: float) -> None:
        session = self._session
        if session is None:
            if now >= self._next_hello and not self._stopping:
                self._say_hello(now)
            return
        if now - self._last_heard > session.lease_s:
            silent_ms = int((now - self._last_heard) * 1000)
            self._lose_session("scheduler silent", now, silent_ms=silent_ms, lease_ms=int(session.lease_s * 1000))
            return
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + min(HEARTBEAT_S, session.lease_s / 4)
            if not self._outbox:
                self._post(heartbeat=self._heartbeat(now))

    def _heartbeat(self, now: float) -> pb.Heartbeat:
        compute = self._compute
        running = compute.running_step is not None
        return pb.Heartbeat(
            state=pb.EXECUTOR_STATE_RUNNING if running else pb.EXECUTOR_STATE_IDLE,
            last_step_id=compute.last_step_id,
            since_ms=max(0, int((now - compute.since) * 1000)),
            percent=100,
        )

    def _say_hello(self, now: float) -> None:
        """Try to send the hello; a link that is not connected yet is asked again soon."""
        sent = self._link.send(self._channel.pack(hello=self._hello)) is SendOutcome.SENT
        if sent:
            log.info("hello sent", extra=kv(last_epoch=self._channel.epoch))
        self._next_hello = now + (_HELLO_RETRY_S if sent else _RETRY_SEND_S * 5)

    def _lose_session(self, event: str, now: float, **keys: object) -> None:
        log.warning(event, extra=kv(epoch=self._channel.epoch, **keys))
        self._session = None
        self._outbox.clear()
        self._compute.begin(0)
        self._next_hello = now

    # In

    def _receive(self) -> bool:
        found = False
        while (frame := self._link.recv()) is not None:
            found = True
            envelope = self._channel.unpack(frame)
            if envelope is None:
                self._metrics.dropped(self._channel.dropped)
                continue
            self._handle(envelope)
            if self._exit is not None:
                break
        return found

    def _handle(self, envelope: pb.ExecutorEnvelope) -> None:
        now = self._clock()
        body = envelope.WhichOneof("body")
        if body == "session_start":
            self._start_session(envelope, now)
        elif body == "reject":
            self._rejected(envelope.reject.reason, now)
        elif self._session is None or envelope.epoch != self._session.epoch:
            self._metrics.stale(f"{body}_without_session")
        else:
            self._last_heard = now
            if body == "plan":
                self._plan(self._session, envelope.plan, now)
            elif body == "goodbye":
                self._lose_session("scheduler said goodbye", now, reason=envelope.goodbye.reason)
                self._next_hello = now + _HELLO_RETRY_S
            elif body != "heartbeat":
                self._metrics.stale(f"unexpected_{body}")

    def _start_session(self, envelope: pb.ExecutorEnvelope, now: float) -> None:
        start = envelope.session_start
        if envelope.epoch <= self._channel.epoch:
            self._metrics.stale("session_start")
            return
        if start.chosen_protocol != PROTOCOL:
            log.error("scheduler chose an unknown protocol", extra=kv(chosen=start.chosen_protocol, known=PROTOCOL))
            self._exit = Exit.FAILED
            return
        self._channel.open(envelope.epoch)
        self._channel.received_seq = envelope.seq
        self._outbox.clear()
        depth = min(max(1, start.pipeline_depth), _MAX_PIPELINE)
        lease_s = start.lease_ms / 1000 if start.lease_ms else self._options.lease_s
        self._session = Session(envelope.epoch, lease_s, PlanWindow(start.first_step_id), depth + _SPARE_PLANS)
        self._compute.begin(envelope.epoch)
        self._last_heard = now
        self._next_heartbeat = now
        self._metrics.session()
        log.info("session", extra=kv(epoch=envelope.epoch, lease_ms=int(lease_s * 1000), pipeline_depth=depth))

    def _rejected(self, reason: str, now: float) -> None:
        if self._session is not None:
            self._metrics.stale("reject")
            return
        log.error("rejected by the scheduler", extra=kv(reason=reason))
        if self._options.exit_after_reject:
            self._exit = Exit.FAILED
        self._next_hello = now + _REJECT_RETRY_S

    def _plan(self, session: Session, plan: pb.StepPlan, now: float) -> None:
        window = session.window
        verdict = window.judge(plan.step_id)
        if verdict is Verdict.RUN and self._compute.num_queued < session.max_queued:
            window.accept()
            self._compute.submit(self._work(session, plan, now))
        elif verdict in (Verdict.RUN, Verdict.GAP):
            self._metrics.stale("plan_gap" if verdict is Verdict.GAP else "plan_overflow")
            self._post(nack=pb.Nack(last_step_id=window.last_step_id))
        else:
            self._metrics.stale("plan_duplicate")
            if verdict is Verdict.REPEAT:
                self._post(result=window.stored(plan.step_id))

    def _work(self, session: Session, plan: pb.StepPlan, now: float) -> Work:
        try:
            decoded = decode_plan(plan, self._limits)
        except PlanError as error:
            return Work(session.epoch, plan.step_id, error, now)
        return Work(session.epoch, plan.step_id, decoded, now, *session.size_of(decoded))
