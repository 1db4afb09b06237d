"""The link to the scheduler: sessions, leases, readiness. `stream_table` knows which stream a message is for.

A session begins with a hello and the scheduler's answer, which carries a new epoch. At each new session all live
streams are submitted again with the ids they already have, so a scheduler that restarts, or a connection that loses a
frame, costs a pause and never a token: a gap in the numbering, an answer that does not come or a silent scheduler all
lead to the same hello. Between sessions streams wait.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from pagemill import columns
from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.framing import Channel
from pagemill.links import SendOutcome
from pagemill.logs import kv
from scheduler_svc.gateway.admin_desk import AdminDesk
from scheduler_svc.gateway.link import AsyncLink, Identity
from scheduler_svc.gateway.metrics import GatewayMetrics
from scheduler_svc.gateway.refusals import not_connected
from scheduler_svc.gateway.stream_table import StreamTable
from scheduler_svc.gateway.streams import LiveStream

_log = logging.getLogger(__name__)

_TICK_S = 0.05
_HEARTBEAT_S = 0.25
_HELLO_S = 0.25
_QUIET_S = 1.0
"""Readiness goes off after this much silence, well before the lease ends: no new work into a void."""
_MAX_FRAMES_PER_TURN = 16


class SchedulerRejectedError(Exception):
    """The scheduler does not want this gateway; the text is its line."""


class SchedulerClient:
    """One gateway's end of its link. Used from the event loop only."""

    def __init__(
        self,
        link: AsyncLink,
        identity: Identity,
        metrics: GatewayMetrics,
        on_ready: Callable[[bool], None] = lambda _: None,
        *,
        session_wait_s: float = 3.0,
        answer_timeout_s: float = 5.0,
        resume_timeout_s: float = 60.0,
    ) -> None:
        self._link = link
        self._identity = identity
        self._metrics = metrics
        self._on_ready = on_ready
        self._session_wait_s = session_wait_s
        self._answer_timeout_s = answer_timeout_s
        """A Submit whose answer takes longer than this was lost: a new session repeats it."""
        self._channel = Channel(wire.FrontendEnvelope)
        self._in_session = asyncio.Event()
        self._lease_s = 2.0
        self._last_heard = 0.0
        self._lost_at = 0.0
        self._next_hello = 0.0
        self._next_heartbeat = 0.0
        self.table = StreamTable(metrics, resume_timeout_s)
        self.desk = AdminDesk(lambda question: self.connected and self._send(admin_request=question))
        self.status = wire.SchedulerStatus()
        self.ready = False

    @property
    def num_streams(self) -> int:
        """Streams that a scheduler may still be working on."""
        return len(self.table)

    @property
    def connected(self) -> bool:
        """Whether there is a session now."""
        return self._in_session.is_set()

    async def run(self) -> None:
        """Keep the session until cancelled. Raises SchedulerRejectedError."""
        rejected: BaseExceptionGroup[SchedulerRejectedError] | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive())
                tasks.create_task(self._tick())
        except* SchedulerRejectedError as group:
            rejected = group
        if rejected is not None:
            raise SchedulerRejectedError(str(rejected.exceptions[0]))

    def submit(self, stream: LiveStream) -> None:
        """Hand a stream to the scheduler, now or when there is one; it fails if there is none in time."""
        self.table.add(stream, time.monotonic())
        self._flush()

    def cancel(self, stream_id: int) -> None:
        """Have the scheduler end a stream; its last word still comes. Without a session the stream ends here."""
        self.table.cancel(stream_id, in_session=self._in_session.is_set())
        self._flush()

    def release(self, stream: LiveStream) -> None:
        """Nobody waits for the stream any more."""
        if stream.bill is None:
            self.cancel(stream.stream_id)
        self.table.remove(stream.stream_id)

    def close(self) -> None:
        """Say goodbye."""
        self._send(goodbye=wire.FrontendGoodbye(reason="gateway stops"))
        self._link.close(linger_s=0.2)

    # ---- Sending ----

    def _send(self, **body: object) -> bool:
        """Whether the frame was taken. One that was not must not use up a number, or the scheduler sees a gap."""
        if self._link.send(self._channel.pack(**body)) is SendOutcome.SENT:
            return True
        self._channel.sent_seq -= 1
        return False

    def _flush(self) -> None:
        """Send what state asks for until the link is full; the rest goes with a later tick."""
        if not self._in_session.is_set():
            return
        table, now = self.table, time.monotonic()
        if table.to_cancel and self._send(cancel=wire.CancelStreams(streams=columns.pack(list(table.to_cancel)))):
            table.to_cancel.clear()
        for stream in table.due(now):
            if not self._send(submit=stream.replay.submit(stream.stream_id, stream.output.token_ids)):
                return
            table.submitted(stream, now)

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            if self._in_session.is_set():
                self._watch(now)
            else:
                self._refuse_waiting(now)
                if now >= self._next_hello:
                    self._next_hello = now + _HELLO_S
                    self._send(hello=self._identity.hello())
            self._update_ready(now)
            self._flush()
            await asyncio.sleep(_TICK_S)

    def _watch(self, now: float) -> None:
        if now - self._last_heard > self._lease_s:
            self._lose_session("scheduler is silent")
        elif self._channel.gaps:
            self._lose_session("messages were lost")
        elif self.table.longest_wait(now) > self._answer_timeout_s:
            self._lose_session("a submitted stream was not answered")
        elif now >= self._next_heartbeat:
            self._next_heartbeat = now + _HEARTBEAT_S
            self._send(heartbeat=wire.FrontendHeartbeat(num_streams=len(self.table)))

    def _refuse_waiting(self, now: float) -> None:
        """Streams that no scheduler has taken wait for one only so long; admitted ones are promised, and wait on."""
        since = now - self._session_wait_s
        if self._lost_at <= since:
            self.table.refuse_waiting(not_connected(), since)

    def _lose_session(self, why: str) -> None:
        _log.warning("session lost", extra=kv(why=why, streams=len(self.table), epoch=self._channel.epoch))
        now = time.monotonic()
        if self._in_session.is_set():
            self._lost_at = now
        self._in_session.clear()
        self._next_hello = 0.0
        self.table.lose_session(now)
        self.desk.lose_session()
        self._update_ready(now)

    # ---- Receiving ----

    async def _receive(self) -> None:
        while True:
            frame: bytes | None = await self._link.recv()
            for _ in range(_MAX_FRAMES_PER_TURN):
                if frame is None:
                    break
                self._handle(frame)
                frame = self._link.recv_nowait()
            if frame is not None:
                self._handle(frame)
            await asyncio.sleep(0)  # frames that are always there must not keep the writers from running

    def _handle(self, frame: bytes) -> None:
        """Take a frame. One that cannot be handled costs a session, which brings again what it carried."""
        try:
            self._take(frame)
        except SchedulerRejectedError:
            raise
        except Exception as error:
            _log.error("unhandled exception in a frame", exc_info=error, extra=kv(error_id=secrets.token_hex(8)))
            self._lose_session("a frame could not be handled")

    def _take(self, frame: bytes) -> None:
        envelope = self._channel.unpack(frame)
        for drop, count in self._channel.dropped.items():
            self._metrics.stale.labels(drop.value).inc(count)
        self._channel.dropped.clear()
        if envelope is None:
            return
        body = envelope.WhichOneof("body")
        if body == "start":
            self._start(envelope)
        elif body == "reject":
            raise SchedulerRejectedError(envelope.reject.reason)
        elif envelope.epoch == self._channel.epoch and self._in_session.is_set():
            self._last_heard = time.monotonic()
            self._dispatch(envelope, body)

    def _start(self, envelope: wire.FrontendEnvelope) -> None:
        if envelope.epoch <= self._channel.epoch:
            return
        self._channel.open(envelope.epoch)
        self._channel.received_seq = envelope.seq
        self._channel.gaps = 0
        self._lease_s = envelope.start.lease_ms / 1000 or 2.0
        self._last_heard = time.monotonic()
        self._next_heartbeat = 0.0
        self._in_session.set()
        self._metrics.sessions.inc()
        self.table.open_session()
        _log.info("session open", extra=kv(epoch=envelope.epoch, streams=len(self.table)))
        self._set_status(envelope.start.status)
        self._flush()

    def _dispatch(self, envelope: wire.FrontendEnvelope, body: str | None) -> None:
        lost: str | None = None
        if body == "tokens":
            ended, lost = self.table.tokens(envelope.tokens)
            for stream in ended:
                self.cancel(stream.stream_id)
        elif body == "accepted":
            self.table.accepted(envelope.accepted.stream)
        elif body == "rejected":
            self.table.rejected(envelope.rejected, time.monotonic())
        elif body == "ended":
            lost = self.table.ended(envelope.ended)
        elif body == "status":
            self._set_status(envelope.status)
        elif body == "admin_reply":
            self.desk.answered(envelope.admin_reply)
        elif body == "goodbye":
            lost = f"scheduler leaves: {envelope.goodbye.reason}"
        if lost is not None:
            self._lose_session(lost)

    def _set_status(self, status: wire.SchedulerStatus) -> None:
        self.status = status
        self._update_ready(time.monotonic())

    def _update_ready(self, now: float) -> None:
        status, mine = self.status, self._identity.model_fingerprint
        same_model = not status.model_fingerprint or not mine or status.model_fingerprint == mine
        heard = self._in_session.is_set() and now - self._last_heard <= min(_QUIET_S, self._lease_s)
        ready = heard and status.ready and not status.draining and same_model
        if ready != self.ready:
            self.ready = ready
            level = logging.INFO if ready else logging.WARNING
            _log.log(level, "ready" if ready else "not ready", extra=kv(session=heard, same_model=same_model))
            self._metrics.ready.set(ready)
            self._on_ready(ready)
