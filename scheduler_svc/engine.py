"""The loop of the scheduler: sockets in, core, sockets out. It never waits on a socket that could be busy.

One round (`step`): results of the executor, messages of the gateways, deadlines, the next plans, what the gateways are
owed, then timers. With two plans allowed in flight, plan N+1 leaves in the round in which result N-1 came, before
result N: scheduling and the wire are hidden behind execution. Between rounds without work it sleeps until a frame, a
signal or the next timer. Where a round has read a large message its plans wait for the next one: taking a prompt of
100,000 tokens in is work of milliseconds, so is admitting it, and between the two others get what they are owed.

One thread. Everything it needs is handed in: links, clock, and how to wait.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum

from pagemill.engine.v1 import frontend_pb2 as pb
from pagemill.links import HubLink
from pagemill.logs import kv
from pagemill.zmq_links import Waiter
from scheduler_svc import admin
from scheduler_svc.audit import Audit
from scheduler_svc.config import EngineConfig
from scheduler_svc.core.params import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.counters import EngineCounters
from scheduler_svc.executor_port import ExecutorPort
from scheduler_svc.executor_session import Loss
from scheduler_svc.gateway_port import GatewayPort
from scheduler_svc.gateway_session import EarlyRefusal
from scheduler_svc.grace import Grace
from scheduler_svc.pressure import MemoryPressure
from scheduler_svc.sessions import Clock, EpochSource, PauseMeter

log = logging.getLogger(__name__)

FRAMES_PER_ROUND = 64
"""Frames read from one side in one round, so that a flood from one cannot keep the other waiting."""
LARGE_FRAME = 65_536
"""Bytes, a prompt of 16,000 tokens: the last frame of a round."""
BACKLOG_RETRY_S = 0.005
"""A full link says nothing when it has room again, so it is tried this often."""
MAX_REPLACED, REPLACED_WITHIN_S = 3, 60.0
"""Times in so many seconds that a core is replaced by one that goes on with its streams."""
_MIN_RETRY_MS, _MAX_RETRY_MS, _UNKNOWN_RETRY_MS = 100, 60_000, 1_000


class Phase(Enum):
    """Serving → draining (first stop) → done."""

    SERVING = "serving"
    DRAINING = "draining"
    DONE = "done"


class Engine:
    """Drives one `Scheduler` between one executor and any number of gateways."""

    def __init__(
        self,
        *,
        core_config: SchedulerConfig,
        config: EngineConfig,
        executor_hub: HubLink,
        gateway_hub: HubLink,
        clock: Clock = time.monotonic,
        first_epoch: int = 0,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self.counters = EngineCounters()
        self.phase = Phase.SERVING
        self._core_config = core_config
        self._config = config
        self._executor_hub, self._gateway_hub = executor_hub, gateway_hub
        self._clock = clock
        self._wait = wait or Waiter([executor_hub, gateway_hub]).wait
        self._pressure = MemoryPressure()
        self._pauses = PauseMeter(config.heartbeat_s, clock())
        self._audit = Audit(self.counters, config.check_every_plans)
        core = Scheduler(core_config)
        epochs = EpochSource(first_epoch)
        self.gateways = GatewayPort(
            hub=gateway_hub, core=core, config=config, epochs=epochs, counters=self.counters, front=self
        )
        self.executors = ExecutorPort(
            hub=executor_hub,
            core=core,
            config=config,
            epochs=epochs,
            counters=self.counters,
            emit=self.gateways.deliver,
            required_fingerprint=self.gateways.fingerprint,
            clock=clock,
            audit=self._audit,
        )
        self._grace = Grace(
            self.executors,
            self.gateways,
            grace_s=config.no_executor_grace_s,
            most_s=config.hello_timeout_s,
            retry_after_ms=_UNKNOWN_RETRY_MS,
        )
        self._is_postponed = False
        """Whether this round leaves its plans to the next one."""
        self._announced: tuple[object, ...] = ()
        self._num_stops = 0
        self._drain_until = 0.0
        self._core_faults = 0
        """Since a plan was last sent while all was well."""
        self._replaced_at: list[float] = []
        """Times of late at which the core was replaced with its streams kept."""

    @property
    def core(self) -> Scheduler:
        """The scheduler in use; another one after a fault that could not be contained otherwise."""
        return self.executors.core

    @property
    def num_dropped_frames(self) -> int:
        """Frames that the links dropped before anybody saw them: strangers, wrong shapes."""
        return self._executor_hub.num_dropped + self._gateway_hub.num_dropped

    # Running

    def run(self) -> int:
        """Serve until stopped; the exit status: 0 after a drain that ended by itself or its limit, 1 when hurried."""
        while self.phase is not Phase.DONE:
            if not self.step():
                self._wait(self.idle_s(self._clock()))
        return 1 if self._num_stops > 1 else 0

    def request_stop(self) -> None:
        """Drain, or stop at once when called again. Safe in a signal handler; takes effect in the next round."""
        self._num_stops += 1

    def step(self) -> bool:
        """One round; whether anything happened, so that another one may find more."""
        now = self._clock()
        num_results, _ = self._read(self._executor_hub, self.executors.handle, now)
        num_messages, is_long = self._read(self._gateway_hub, self.gateways.handle, now)
        self._is_postponed = is_long and not self._is_postponed  # never twice in a row
        sent = False if self._is_postponed else self._advance(now)
        try:
            self._keep_up(now, sent, all_read=not is_long and max(num_results, num_messages) < FRAMES_PER_ROUND)
        except Exception:
            self._contain("round", now, is_core=True)
            if self._num_stops > 1:  # hurried: nothing may keep the process any more
                self.phase = Phase.DONE
        return bool(sent or num_results or num_messages)

    def _keep_up(self, now: float, sent: bool, *, all_read: bool) -> None:
        """Stopping, silence, books, and what the gateways are owed."""
        if self._num_stops:
            self._drain(now)
        if all_read:  # so silence is silence
            paused_s = self._pauses.since_last(now)
            self.executors.tick(now, paused_s)
            self.gateways.tick(now, paused_s)
            self._grace.check(now)
        self._check_books(now, sent)
        self._check_memory(now)
        self._announce()
        self.gateways.flush(now)

    def _read(self, hub: HubLink, handle: Callable[..., None], now: float) -> tuple[int, bool]:
        """Handle what has come, up to a round's worth; how many frames, and whether the last was a large one."""
        for count in range(FRAMES_PER_ROUND):
            item = hub.recv()
            if item is None:
                return count, False
            try:
                handle(*item, now)
            except Exception:
                executor = self.executors.session
                self._contain("message", now, is_core=executor is not None and executor.peer == item[0])
            if len(item[1]) >= LARGE_FRAME:
                return count + 1, True
        return FRAMES_PER_ROUND, False

    def _advance(self, now: float) -> bool:
        """Deadlines, then plans; whether a plan was sent."""
        try:
            due = self.core.next_deadline()
            if due is not None and due <= now:
                self.gateways.deliver(self.core.expire(now))
            sent = self.executors.send_plans(now)
        except Exception:
            self._contain("step", now, is_core=True)
            return False
        if sent and not self.executors.is_failing:
            self._core_faults = 0
        return sent

    def idle_s(self, now: float) -> float:
        """How long to sleep when a round found nothing to do."""
        if self.gateways.has_backlog or self.executors.has_backlog:
            return BACKLOG_RETRY_S
        due = min(self.executors.due(), self.gateways.due(), now + self._config.heartbeat_s)
        deadline = self.core.next_deadline()
        return max(0.0, min(due, due if deadline is None else deadline) - now)

    # Faults

    def _contain(self, what: str, now: float, *, is_core: bool) -> None:
        """Log an exception under an id and go on; when the core may be at fault, from a state known to be good."""
        self.counters.faults += 1
        fault_id = secrets.token_hex(4)
        log.exception("fault contained", extra=kv(fault=fault_id, what=what))
        if not is_core:
            return
        self._core_faults += 1
        if self._core_faults == 1:
            try:
                self.executors.restart(now, f"fault {fault_id}")
                return
            except Exception:
                log.exception("session cannot be restarted", extra=kv(fault=fault_id))
        self._replace_core(now, fault_id)

    def _replace_core(self, now: float, fault_id: str) -> None:
        """A fresh core and a new session; live sequences go on in it, computed again.

        The last resort, when cores have been replaced too often: all streams end with INTERNAL, for one of them may be
        what breaks the core.
        """
        old = self.core
        core = Scheduler(self._core_config)
        self.executors.core = self.gateways.core = core
        self._replaced_at = [then for then in self._replaced_at if now - then < REPLACED_WITHIN_S]
        if len(self._replaced_at) < MAX_REPLACED:
            self._replaced_at.append(now)
            try:
                core.take_over(old, now)
                self.gateways.deliver(core.expire(now))  # those that had ended already
            except Exception:
                log.exception("streams cannot be taken over", extra=kv(fault=fault_id))
        else:
            self._replaced_at.clear()
        self._end_unknown_streams(now, fault_id)
        log.error(
            "core replaced",
            extra=kv(fault=fault_id, steps=old.next_step_id - 1, streams_kept=self.gateways.num_streams),
        )
        try:
            self.executors.restart(now, f"fault {fault_id}")
        except Exception:  # an executor this build cannot talk to: without it, the next one may do
            log.exception("session cannot be restarted", extra=kv(fault=fault_id))
            self.executors.detach(now, f"fault {fault_id}", Loss.LEFT)

    def _end_unknown_streams(self, now: float, fault_id: str) -> int:
        """Every stream of which the core knows nothing would wait for ever; how many there were."""
        core = self.core
        return self.gateways.end_streams(
            now,
            pb.STREAM_ERROR_INTERNAL,
            f"the request could not be computed (fault {fault_id})",
            among=lambda session: [seq_id for seq_id in session.stream_of if not core.knows(seq_id)],
        )

    def _check_books(self, now: float, sent: bool) -> None:
        """Check conservation when it is time; a mismatch heals, it never kills."""
        is_busy = sent or self.core.num_inflight_plans > 0
        if not self._audit.is_due(now, is_busy=is_busy):
            return
        if self._audit.check(self.core, now):
            self._replace_core(now, "invariants")
        else:
            self.counters.violations["streams"] += self._end_unknown_streams(now, "streams")

    def _check_memory(self, now: float) -> None:
        finding = self._pressure.look(self.core.stats, now)
        if finding is not None:
            log.warning("KV memory is too small for the load", extra=kv(**asdict(finding)))

    def admin(self, operation: int, now: float) -> pb.AdminReply:
        """As `Front.admin`."""
        return admin.answer(operation, self.core, self._audit, now)

    # Admission (Front)

    def refuse_now(self, now: float) -> EarlyRefusal | None:
        """As `Front.refuse_now`."""
        if self.phase is not Phase.SERVING:
            return EarlyRefusal(pb.STREAM_ERROR_DRAINING, "the scheduler is shutting down", _UNKNOWN_RETRY_MS)
        return self._grace.refusal(now)

    def retry_after_ms(self) -> int:
        """As `Front.retry_after_ms`: queued tokens over the measured rate."""
        rate = self.executors.tokens_per_s()
        if rate is None or rate <= 0:
            return _UNKNOWN_RETRY_MS
        return max(_MIN_RETRY_MS, min(_MAX_RETRY_MS, round(1000 * self.core.stats().queue_tokens / rate)))

    def vocab_size(self) -> int | None:
        """As `Front.vocab_size`."""
        session = self.executors.session
        return None if session is None else session.hello.vocab_size

    def executor_fingerprint(self) -> str | None:
        """As `Front.executor_fingerprint`."""
        session = self.executors.session
        return None if session is None else session.hello.model_fingerprint

    # Status (Front)

    def status(self) -> pb.SchedulerStatus:
        """As `Front.status`."""
        stats = self.core.stats()
        session = self.executors.session
        status = pb.SchedulerStatus(
            draining=self.phase is not Phase.SERVING,
            queue_requests=stats.queue_requests,
            queue_tokens=stats.queue_tokens,
            running_requests=stats.running,
        )
        if session is not None:
            status.ready = True
            status.num_executors = 1
            status.model_fingerprint = session.hello.model_fingerprint
            status.max_model_len = session.limits.max_model_len
            status.kv_capacity_tokens = session.limits.num_device_blocks * session.limits.block_size
        return status

    def _announce(self) -> None:
        """Tell the gateways when something changed that they act on; counts go with the heartbeats."""
        session = self.executors.session
        state = (self.phase, session, None if session is None else session.hello.model_fingerprint)
        if state != self._announced:
            self._announced = state
            self.gateways.announce()

    # Stopping

    def _drain(self, now: float) -> None:
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING
            self._drain_until = now + self._config.drain_timeout_s
            log.info("draining", extra=kv(streams=self.gateways.num_streams, limit_s=self._config.drain_timeout_s))
        absent = self.executors.session is None and now - self.executors.absent_since > self._config.lease_s
        over = self._num_stops > 1 or absent or now >= self._drain_until
        if over or (self.gateways.num_streams == 0 and not self.gateways.has_backlog):
            self._finish(now)

    def _finish(self, now: float) -> None:
        """Every stream has its end before the links are closed."""
        left = self.gateways.end_streams(
            now, pb.STREAM_ERROR_DRAINING, "the scheduler is shutting down", retry_after_ms=_UNKNOWN_RETRY_MS
        )
        self.gateways.flush(now)
        self.gateways.goodbye("the scheduler is shutting down")
        self.executors.goodbye("the scheduler is shutting down")
        self.phase = Phase.DONE
        log.info("stopped", extra=kv(streams_cut=left, plans=self.counters.plans_sent))
