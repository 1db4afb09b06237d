"""The link to the scheduler: sessions, leases, and which stream a message is for.

A session begins with a hello and the scheduler's answer, which carries a new epoch. At each new session all live
streams are submitted again with the ids they already have, so a scheduler that restarts, or a connection that loses a
frame, costs a pause and never a token: a gap in the numbering, an answer that does not come or a silent scheduler all
lead to the same hello. Between sessions streams wait.

What is to be sent is derived from state (streams that need a Submit, streams to be cancelled), so it is bounded by the
number of live streams and nothing is lost while the link is full.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagemill import columns
from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.errors import PagemillError, Reason
from pagemill.framing import PROTOCOL, Channel
from pagemill.links import SendOutcome
from pagemill.logs import kv
from scheduler_svc.gateway.metrics import GatewayMetrics
from scheduler_svc.gateway.streams import LiveStream

_log = logging.getLogger(__name__)

_TICK_S = 0.05
_HEARTBEAT_S = 0.25
_HELLO_S = 0.25
_QUIET_S = 1.0
"""Readiness goes off after this much silence, well before the lease ends: no new work into a void."""
_ANSWER_TIMEOUT_S = 5.0
_MAX_FRAMES_PER_TURN = 16
_RETRY_S = 0.5
_RETRY_FOR_S = 60.0
_MAX_STREAM_ID = 2**31 - 1

_REASONS = {
    wire.STREAM_ERROR_PROMPT_EXCEEDS_KV_CAPACITY: Reason.PROMPT_EXCEEDS_KV_CAPACITY,
    wire.STREAM_ERROR_QUEUE_FULL: Reason.QUEUE_FULL,
    wire.STREAM_ERROR_QUEUE_TIMEOUT: Reason.QUEUE_TIMEOUT,
    wire.STREAM_ERROR_DEADLINE: Reason.DEADLINE_EXCEEDED,
    wire.STREAM_ERROR_NO_EXECUTOR: Reason.NO_EXECUTOR,
    wire.STREAM_ERROR_DRAINING: Reason.DRAINING,
    wire.STREAM_ERROR_NUMERICAL: Reason.NUMERICAL_ERROR,
    wire.STREAM_ERROR_INTERNAL: Reason.INTERNAL,
    wire.STREAM_ERROR_CONTEXT_LENGTH: Reason.CONTEXT_LENGTH_EXCEEDED,
}
_TEXTS = {
    Reason.DEADLINE_EXCEEDED: "the call's deadline has passed",
    Reason.QUEUE_TIMEOUT: "max_queue_ms went by in the queue",
    Reason.NO_EXECUTOR: "no executor is connected",
    Reason.DRAINING: "the server is shutting down",
    Reason.NUMERICAL_ERROR: "the model gave no finite logits",
}
_PASSING = frozenset({wire.STREAM_ERROR_QUEUE_FULL, wire.STREAM_ERROR_NO_EXECUTOR, wire.STREAM_ERROR_DRAINING})


class AsyncLink(Protocol):
    """What is needed of a link; `pagemill.zmq_links.AsyncPeer` is one."""

    def send(self, frame: bytes) -> SendOutcome:
        """At once, never waits."""
        ...

    async def recv(self) -> bytes:
        """The next frame. Raises ConnectionAbortedError once closed."""
        ...

    def recv_nowait(self) -> bytes | None:
        """The next frame if one is there."""
        ...

    def close(self, linger_s: float = 0.0) -> None:
        """Stop."""
        ...


class SchedulerRejectedError(Exception):
    """The scheduler does not want this gateway; the text is its line."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a hello says about this process."""

    version: str
    incarnation: str
    host: str
    model_fingerprint: str
    schema_hash: str = ""


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
    ) -> None:
        self._link = link
        self._identity = identity
        self._metrics = metrics
        self._on_ready = on_ready
        self._session_wait_s = session_wait_s
        self._channel = Channel(wire.FrontendEnvelope)
        self._in_session = asyncio.Event()
        self._lease_s = 2.0
        self._last_heard = 0.0
        self._lost_at = 0.0
        self._next_hello = 0.0
        self._next_heartbeat = 0.0
        self._next_id = 0
        self._streams: dict[int, LiveStream] = {}
        self._to_submit: dict[int, float] = {}  # stream -> not before
        self._unanswered: dict[int, float] = {}  # stream -> sent when
        self._to_cancel: set[int] = set()
        self.status = wire.SchedulerStatus()
        self.ready = False

    @property
    def num_streams(self) -> int:
        """Streams that a scheduler may still be working on."""
        return len(self._streams)

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

    def new_id(self) -> int:
        """A stream number that no live stream has."""
        while True:
            self._next_id = self._next_id % _MAX_STREAM_ID + 1
            if self._next_id not in self._streams:
                return self._next_id

    def submit(self, stream: LiveStream) -> None:
        """Hand a stream to the scheduler, now or when there is one; it fails if there is none in time."""
        stream.submitted_at = time.monotonic()
        self._streams[stream.stream_id] = stream
        self._to_submit[stream.stream_id] = 0.0
        self._flush()

    def cancel(self, stream_id: int) -> None:
        """Have the scheduler end a stream; its last word still comes. Without a session the stream ends here."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        unknown = self._to_submit.pop(stream_id, None) is not None  # to the scheduler, yet or any more
        if unknown or not self._in_session.is_set():  # the next session is not told of it
            stream.end(wire.StreamEnded(stream=stream_id, reason=wire.END_REASON_CANCELLED))
        else:
            self._to_cancel.add(stream_id)
            self._flush()

    def release(self, stream: LiveStream) -> None:
        """Nobody waits for the stream any more."""
        if stream.bill is None:
            self.cancel(stream.stream_id)
        self._streams.pop(stream.stream_id, None)
        self._to_submit.pop(stream.stream_id, None)
        self._unanswered.pop(stream.stream_id, None)

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
        if self._to_cancel and self._send(cancel=wire.CancelStreams(streams=columns.pack(list(self._to_cancel)))):
            self._to_cancel.clear()
        now = time.monotonic()
        for stream_id, not_before in list(self._to_submit.items()):
            stream = self._streams.get(stream_id)
            if stream is None or stream.is_over:
                del self._to_submit[stream_id]
            elif not_before <= now:
                if not self._send(submit=stream.replay.submit(stream_id, stream.output.token_ids)):
                    return
                del self._to_submit[stream_id]
                self._unanswered[stream_id] = now

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            if self._in_session.is_set():
                self._watch(now)
            else:
                self._refuse_unanswered(now)
                if now >= self._next_hello:
                    self._next_hello = now + _HELLO_S
                    self._hello()
            self._update_ready(now)
            self._flush()
            await asyncio.sleep(_TICK_S)

    def _hello(self) -> None:
        me = self._identity
        self._send(
            hello=wire.FrontendHello(
                protocol_min=PROTOCOL,
                protocol_max=PROTOCOL,
                schema_hash=me.schema_hash,
                version=me.version,
                incarnation=me.incarnation,
                host=me.host,
                model_fingerprint=me.model_fingerprint,
            )
        )

    def _watch(self, now: float) -> None:
        if now - self._last_heard > self._lease_s:
            self._lose_session("scheduler is silent")
        elif self._channel.gaps:
            self._lose_session("messages were lost")
        elif self._unanswered and now - min(self._unanswered.values()) > _ANSWER_TIMEOUT_S:
            self._lose_session("a submitted stream was not answered")
        elif now >= self._next_heartbeat:
            self._next_heartbeat = now + _HEARTBEAT_S
            self._send(heartbeat=wire.FrontendHeartbeat(num_streams=len(self._streams)))

    def _refuse_unanswered(self, now: float) -> None:
        """Streams that no scheduler has taken wait for one only so long; admitted ones are promised, and wait on."""
        for stream in self._streams.values():
            if not stream.admitted and now - max(self._lost_at, stream.submitted_at) >= self._session_wait_s:
                stream.fail(PagemillError(Reason.NOT_READY, "no scheduler is connected", retry_after_ms=1000))

    def _lose_session(self, why: str) -> None:
        _log.warning("session lost", extra=kv(why=why, streams=len(self._streams), epoch=self._channel.epoch))
        if self._in_session.is_set():
            self._lost_at = time.monotonic()
        self._in_session.clear()
        self._next_hello = 0.0
        self._end_cancelled()
        self._update_ready(time.monotonic())

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
        self._to_cancel.clear()
        self._unanswered.clear()
        self._to_submit = {i: 0.0 for i, s in self._streams.items() if not s.is_over and not s.cancel_requested}
        _log.info("session open", extra=kv(epoch=envelope.epoch, streams=len(self._streams)))
        self._end_cancelled()
        self._set_status(envelope.start.status)
        self._flush()

    def _end_cancelled(self) -> None:
        """No later session knows streams that had ended or were to be cancelled: nothing more will come."""
        for stream in list(self._streams.values()):
            if stream.bill is None and (stream.cancel_requested or stream.is_over):
                stream.end(wire.StreamEnded(stream=stream.stream_id, reason=wire.END_REASON_CANCELLED))

    def _dispatch(self, envelope: wire.FrontendEnvelope, body: str | None) -> None:
        if body == "tokens":
            self._tokens(envelope.tokens)
        elif body == "accepted":
            self._unanswered.pop(envelope.accepted.stream, None)
            if (stream := self._streams.get(envelope.accepted.stream)) is not None:
                stream.accept()
        elif body == "rejected":
            self._rejected(envelope.rejected)
        elif body == "ended":
            self._ended(envelope.ended)
        elif body == "status":
            self._set_status(envelope.status)
        elif body == "goodbye":
            self._lose_session(f"scheduler leaves: {envelope.goodbye.reason}")

    def _tokens(self, batch: wire.TokenBatch) -> None:
        """Hand each entry to its stream. A batch that does not add up, or tokens that are missing, end the session."""
        try:
            streams, first_index, ids = (
                columns.unpack(batch.streams),
                columns.unpack(batch.first_index),
                columns.unpack(batch.token_ids),
            )
            counts = columns.unpack(batch.counts) if batch.counts else [1] * len(streams)
        except ValueError:
            streams, first_index, ids, counts = [], [], [0], []
        if not (
            len(streams) == len(first_index) == len(counts) and sum(counts) == len(ids) and min(counts, default=1) > 0
        ):
            self._metrics.stale.labels("malformed").inc()
            self._lose_session("a malformed batch of tokens")
            return
        position, accepted, complete = 0, 0, True
        for stream_id, index, count in zip(streams, first_index, counts, strict=True):
            stream = self._streams.get(stream_id)
            if stream is not None:
                was_over, had = stream.is_over, len(stream.output.token_ids)
                complete &= stream.add_tokens(index, ids[position : position + count])
                accepted += len(stream.output.token_ids) - had
                if not was_over and stream.ends_early:
                    self.cancel(stream_id)
            position += count
        self._metrics.generated_tokens.inc(accepted)
        if not complete:
            self._lose_session("tokens are missing")

    def _rejected(self, rejected: wire.StreamRejected) -> None:
        self._unanswered.pop(rejected.stream, None)
        stream = self._streams.get(rejected.stream)
        if stream is None:
            return
        retry_after_ms = rejected.retry_after_ms if rejected.HasField("retry_after_ms") else None
        now = time.monotonic()
        if stream.admitted and rejected.error in _PASSING:
            if stream.cancel_requested or stream.is_over:
                stream.end(wire.StreamEnded(stream=rejected.stream, reason=wire.END_REASON_CANCELLED))
                return
            # It was admitted once: a promise. The client sees a pause while the new scheduler finds its feet.
            stream.retry_until = stream.retry_until or now + _RETRY_FOR_S
            if now < stream.retry_until:
                self._to_submit[rejected.stream] = now + _RETRY_S
                return
        stream.fail(_error(rejected.error, rejected.message, retry_after_ms))

    def _ended(self, ended: wire.StreamEnded) -> None:
        self._unanswered.pop(ended.stream, None)
        stream = self._streams.get(ended.stream)
        if stream is None:
            return
        if ended.reason == wire.END_REASON_UNSPECIFIED:
            stream.bill = ended
            retry_after_ms = ended.retry_after_ms if ended.HasField("retry_after_ms") else None
            stream.fail(_error(ended.error, ended.message, retry_after_ms))
        elif ended.num_output_tokens > len(stream.output.token_ids) and not stream.is_over:
            self._lose_session("tokens are missing before an end")
        else:
            stream.end(ended)

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


def _error(code: int, message: str, retry_after_ms: int | None) -> PagemillError:
    reason = _REASONS.get(code, Reason.INTERNAL)  # type: ignore[call-overload]
    text = message if reason is not Reason.INTERNAL else ""
    return PagemillError(reason, text or _TEXTS.get(reason, reason.value), retry_after_ms=retry_after_ms)
