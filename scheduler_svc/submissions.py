"""What gateways submit, on its way into the core: numbered, checked, queued, or refused with the reason."""

from __future__ import annotations

import logging
import secrets

from pagemill.engine.v1 import frontend_pb2 as pb
from pagemill.logs import REQUEST_ID, SEQ_ID, kv
from scheduler_svc.core.events import RefusalReason
from scheduler_svc.core.params import SeqId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.counters import EngineCounters
from scheduler_svc.gateway_codec import decode_submit, encode_refusal
from scheduler_svc.gateway_session import Front, GatewaySession
from scheduler_svc.sessions import peer_name, plain
from scheduler_svc.wire_checks import WireError

log = logging.getLogger(__name__)


class Submissions:
    """Takes the submissions of all gateways."""

    def __init__(self, front: Front, counters: EngineCounters) -> None:
        self._front = front
        self._counters = counters
        self._next_seq_id = 1

    def take(self, core: Scheduler, session: GatewaySession, message: pb.Submit, now: float) -> None:
        """Queue it in the core; the answer is among the session's replies."""
        if message.stream < 1 or message.stream in session.streams:
            log.error("stream number refused", extra=kv(gateway=peer_name(session.peer), stream=message.stream))
            self._counters.stale["bad_stream"] += 1
            return
        try:
            rejected = self._submit(core, session, message, now)
        except Exception as error:  # the barrier: one input fails one stream, never the loop
            fault_id = secrets.token_hex(4)
            known = isinstance(error, WireError)
            self._counters.faults += not known
            log.error(
                "submit refused",
                extra=kv(fault=fault_id, why=str(error) if known else type(error).__name__, stream=message.stream),
                exc_info=None if known else error,
            )
            text = f"the request could not be taken (fault {fault_id})"
            rejected = pb.StreamRejected(stream=message.stream, error=pb.STREAM_ERROR_INTERNAL, message=text)
        if rejected is not None:
            self._counters.outcomes[pb.StreamError.Name(rejected.error).removeprefix("STREAM_ERROR_").lower()] += 1
            session.replies.append({"rejected": rejected})

    def _submit(
        self, core: Scheduler, session: GatewaySession, message: pb.Submit, now: float
    ) -> pb.StreamRejected | None:
        """Queue it, and answer; or the refusal."""
        stream = message.stream
        early = self._front.refuse_now(now)
        if early is not None:
            return pb.StreamRejected(
                stream=stream, error=early.error, message=early.message, retry_after_ms=early.retry_after_ms
            )
        if message.HasField("deadline_ms") and message.deadline_ms == 0:
            return pb.StreamRejected(stream=stream, error=pb.STREAM_ERROR_DEADLINE, message="the deadline has passed")
        seq_id = SeqId(self._next_seq_id)
        self._next_seq_id += 1
        spec = decode_submit(message, seq_id=seq_id, group=session.group, vocab_size=self._front.vocab_size(), now=now)
        refusal = core.submit(spec, now)
        if refusal is not None:
            is_full = refusal.reason is RefusalReason.QUEUE_FULL
            return encode_refusal(stream, refusal, self._front.retry_after_ms() if is_full else None)
        session.streams[stream] = seq_id
        session.stream_of[seq_id] = stream
        if not spec.emitted_ids:
            session.silent.add(seq_id)
        session.replies.append({"accepted": pb.StreamAccepted(stream=stream)})
        if log.isEnabledFor(logging.DEBUG):
            log.debug("queued", extra=kv(**{REQUEST_ID: plain(message.client_request_id, 128), SEQ_ID: seq_id}))
        return None
