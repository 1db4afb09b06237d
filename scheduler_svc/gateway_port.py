"""The scheduler's side of its gateways: who they are, their streams, and what waits to be sent to them.

What a gateway is owed is kept in three buckets that are always sent in this order: replies (accepted, rejected,
status), tokens, endings. A stream's number is never used twice, so the order of each stream's own messages follows,
however many steps are coalesced while the gateway's link is full: all its tokens are then one message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from pagemill.engine.v1 import frontend_pb2 as pb
from pagemill.framing import PROTOCOL, Channel
from pagemill.links import HubLink, PeerId, SendOutcome
from pagemill.logs import kv
from scheduler_svc.config import EngineConfig
from scheduler_svc.core.events import Event, FinishedEvent, FinishReason, TokensEvent
from scheduler_svc.core.params import SeqId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.counters import EngineCounters
from scheduler_svc.gateway_codec import decode_cancel, encode_ended
from scheduler_svc.gateway_session import Front, GatewaySession
from scheduler_svc.sessions import EpochSource, peer_name, plain, refuse_hello
from scheduler_svc.submissions import Submissions
from scheduler_svc.wire_checks import WireError

log = logging.getLogger(__name__)

MAX_GATEWAYS = 256
MAX_PENDING_MESSAGES = 100_000
"""Replies and endings that may wait for one gateway whose link is full: several per stream it can have."""


class GatewayPort:
    """The hub for gateways and the sessions with them."""

    def __init__(
        self,
        *,
        hub: HubLink,
        core: Scheduler,
        config: EngineConfig,
        epochs: EpochSource,
        counters: EngineCounters,
        front: Front,
    ) -> None:
        self.core = core
        self.sessions: dict[PeerId, GatewaySession] = {}
        self._by_group: dict[int, GatewaySession] = {}
        self._hub = hub
        self._config = config
        self._epochs = epochs
        self._counters = counters
        self._front = front
        self._next_group = 1
        self._submissions = Submissions(front, counters)
        self._handlers: dict[str, Callable[[GatewaySession, pb.FrontendEnvelope, float], None]] = {
            "submit": self._on_submit,
            "cancel": self._on_cancel,
            "admin_request": self._on_admin,
            "heartbeat": lambda session, envelope, now: None,
            "goodbye": lambda session, envelope, now: self.drop(session, now, "left"),
        }

    @property
    def num_streams(self) -> int:
        """Streams alive over all gateways."""
        return sum(len(session.streams) for session in self.sessions.values())

    @property
    def has_backlog(self) -> bool:
        """Whether something waits for a link that was full."""
        return any(session.has_pending for session in self.sessions.values())

    def fingerprint(self) -> str | None:
        """The model that the connected gateways serve; None without gateways."""
        return next((session.fingerprint for session in self.sessions.values()), None)

    # Frames in

    def handle(self, peer: PeerId, frame: bytes, now: float) -> None:
        """Act on one frame, whoever sent it."""
        session = self.sessions.get(peer)
        channel = Channel(pb.FrontendEnvelope) if session is None else session.channel
        envelope = channel.unpack(frame)
        if envelope is None:
            self._counters.stale.update(drop.value for drop in channel.dropped)
            channel.dropped.clear()
            return
        body = envelope.WhichOneof("body") or ""
        if body == "hello":
            self._on_hello(peer, envelope, now)
        elif session is None:
            self._counters.stale["no_session"] += 1
        elif envelope.epoch != session.channel.epoch:
            self._counters.stale["future_epoch"] += 1
        elif body not in self._handlers:
            self._counters.stale["unexpected"] += 1
        else:
            session.last_heard = now
            self._handlers[body](session, envelope, now)

    def _on_hello(self, peer: PeerId, envelope: pb.FrontendEnvelope, now: float) -> None:
        hello = envelope.hello
        reason = refuse_hello(hello, envelope.epoch) or self._refuse(peer, hello)
        if reason is not None:
            log.warning("gateway rejected", extra=kv(gateway=peer_name(peer), reason=reason))
            self._counters.stale["rejected_hello"] += 1
            reject = Channel(pb.FrontendEnvelope)
            reject.open(self._epochs.for_reject(envelope.epoch))
            self._hub.send(peer, reject.pack(reject=pb.FrontendReject(reason=reason)))
            return
        earlier = self.sessions.get(peer)
        if earlier is not None:
            self.drop(earlier, now, "said_hello_again")
        session = GatewaySession(
            peer, self._next_group, hello.model_fingerprint, now, next_heartbeat=now + self._config.heartbeat_s
        )
        self._next_group += 1
        session.channel.open(self._epochs.next(envelope.epoch))
        self.sessions[peer] = self._by_group[session.group] = session
        start = pb.FrontendStart(
            chosen_protocol=PROTOCOL, lease_ms=round(self._config.lease_s * 1000), status=self._front.status()
        )
        session.replies.append({"start": start})
        log.info("gateway attached", extra=kv(gateway=peer_name(peer), version=plain(hello.version)))

    def _refuse(self, peer: PeerId, hello: pb.FrontendHello) -> str | None:
        executor = self._front.executor_fingerprint()
        if executor is not None and hello.model_fingerprint != executor:
            return f"its model {hello.model_fingerprint} is not the executor's, {executor}"
        others = {s.fingerprint for s in self.sessions.values() if s.peer != peer}
        if others and hello.model_fingerprint not in others:
            return f"its model {hello.model_fingerprint} is not the other gateways', {others.pop()}"
        if len(self.sessions) >= MAX_GATEWAYS and peer not in self.sessions:
            return f"{MAX_GATEWAYS} gateways are connected already"
        return None

    def _on_submit(self, session: GatewaySession, envelope: pb.FrontendEnvelope, now: float) -> None:
        self._submissions.take(self.core, session, envelope.submit, now)

    def _on_cancel(self, session: GatewaySession, envelope: pb.FrontendEnvelope, now: float) -> None:
        try:
            streams = decode_cancel(envelope.cancel)
        except WireError:
            self._counters.stale["malformed"] += 1
            return
        for stream in streams:
            seq_id = session.streams.get(stream)
            if seq_id is not None:
                self.deliver(self.core.cancel(seq_id, now))

    def _on_admin(self, session: GatewaySession, envelope: pb.FrontendEnvelope, now: float) -> None:
        reply = self._front.admin(envelope.admin_request.operation, now)
        reply.id = envelope.admin_request.id
        session.replies.append({"admin_reply": reply})

    # Events out

    def deliver(self, events: list[Event]) -> None:
        """Put the core's events into the buckets of their gateways; those of gateways that are gone are dropped."""
        for event in events:
            session = self._by_group.get(event.group)
            if session is None:
                continue
            if isinstance(event, TokensEvent):
                stream_of = session.stream_of
                session.add_tokens([stream_of[seq_id] for seq_id in event.seq_ids], event)
                if session.silent:
                    session.silent.difference_update(event.seq_ids)
            else:
                self._end(session, event)

    def _end(self, session: GatewaySession, event: FinishedEvent) -> None:
        stream = self._forget(session, event.seq_id)
        if stream is not None:
            self._counters.outcomes[event.reason.value] += 1
            in_queue = event.reason is FinishReason.QUEUE_TIMEOUT
            session.endings.append(encode_ended(stream, event, self._front.retry_after_ms() if in_queue else None))

    def _forget(self, session: GatewaySession, seq_id: SeqId) -> int | None:
        stream = session.stream_of.pop(seq_id, None)
        if stream is not None:
            del session.streams[stream]
            session.silent.discard(seq_id)
        return stream

    def end_streams(
        self,
        now: float,
        error: pb.StreamError,
        message: str,
        *,
        among: Callable[[GatewaySession], Iterable[SeqId]] | None = None,
        retry_after_ms: int | None = None,
    ) -> int:
        """End all streams, or those that `among` chooses, with an error; returns how many."""
        num_ended = 0
        outcome = pb.StreamError.Name(error).removeprefix("STREAM_ERROR_").lower()
        for session in self.sessions.values():
            for seq_id in list(session.stream_of if among is None else among(session)):
                stream = self._forget(session, seq_id)
                if stream is None:
                    continue
                self.deliver(self.core.cancel(seq_id, now))  # its own ending finds no stream any more
                session.endings.append(
                    pb.StreamEnded(stream=stream, error=error, message=message, retry_after_ms=retry_after_ms)
                )
                self._counters.outcomes[outcome] += 1
                num_ended += 1
        return num_ended

    def flush(self, now: float) -> None:
        """Send what waits, as far as the links take it; drop gateways that are gone or too far behind."""
        for session in list(self.sessions.values()):
            if session.has_pending:
                self._flush(session, now)

    def _flush(self, session: GatewaySession, now: float) -> None:
        while True:
            if session.unsent is None:
                body = session.take_body()
                if body is None:
                    return
                session.unsent = session.channel.pack(**body)
            outcome = self._hub.send(session.peer, session.unsent)
            if outcome is SendOutcome.SENT:
                session.unsent = None
                continue
            if outcome is SendOutcome.GONE:
                self.drop(session, now, "gone")
            elif (
                len(session.token_ids) > self._config.max_pending_tokens
                or len(session.replies) + len(session.endings) > MAX_PENDING_MESSAGES
            ):
                self.drop(session, now, "too_slow")
            return

    def drop(self, session: GatewaySession, now: float, reason: str) -> None:
        """End a session and cancel its streams. The gateway will say hello again if it lives."""
        if self.sessions.get(session.peer) is not session:
            return
        log.warning(
            "gateway detached",
            extra=kv(gateway=peer_name(session.peer), reason=reason, streams=len(session.streams)),
        )
        self._counters.gateways_dropped[reason] += 1
        del self.sessions[session.peer], self._by_group[session.group]
        for seq_id in session.stream_of:
            self._counters.outcomes["gateway_lost"] += 1
            self.deliver(self.core.cancel(seq_id, now))

    # Time

    def tick(self, now: float, paused_s: float = 0.0) -> None:
        """Heartbeats and leases; call it when no frame waits to be read. `paused_s` as `ExecutorPort.tick`."""
        for session in list(self.sessions.values()):
            session.last_heard = min(now, session.last_heard + paused_s)
            if now - session.last_heard > self._config.lease_s:
                self.drop(session, now, "silent")
            elif now >= session.next_heartbeat:
                session.next_heartbeat = now + self._config.heartbeat_s
                if not session.has_pending:  # a link that is full would only pile them up
                    self._add_status(session)
                    session.replies.append({"heartbeat": pb.FrontendHeartbeat(num_streams=len(session.streams))})

    def announce(self) -> None:
        """Tell all gateways the state now."""
        for session in self.sessions.values():
            self._add_status(session)

    def _add_status(self, session: GatewaySession) -> None:
        session.replies.append({"status": self._front.status()})

    def due(self) -> float:
        """When `tick` has something to do at the latest."""
        return min((session.next_heartbeat for session in self.sessions.values()), default=float("inf"))

    def goodbye(self, reason: str) -> None:
        """A last word to all."""
        for session in self.sessions.values():
            if session.unsent is None:
                self._hub.send(session.peer, session.channel.pack(goodbye=pb.FrontendGoodbye(reason=reason)))
