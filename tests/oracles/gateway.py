"""A gateway without text, for tests: submits streams over the real wire, records what comes, and checks its order."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagemill.columns import pack, unpack
from pagemill.engine.v1 import frontend_pb2 as pb
from pagemill.engine.v1.sampling_pb2 import Sampling
from pagemill.framing import PROTOCOL, Channel
from pagemill.links import PeerLink, SendOutcome
from tests.oracles.base import FINGERPRINT


@dataclass
class StreamRecord:
    """One stream as its client would see it."""

    stream: int
    message: pb.Submit
    ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    num_doubled: int = 0
    """Tokens that came again, after a resubmission."""
    rejected: pb.StreamRejected | None = None
    ended: pb.StreamEnded | None = None

    @property
    def is_over(self) -> bool:
        return self.rejected is not None or self.ended is not None


class FakeGateway:
    """`poll` does what is due now. Keeps the replay state: a new session resubmits what is alive."""

    def __init__(
        self, link: PeerLink, *, fingerprint: str = FINGERPRINT, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.link = link
        self.clock = clock
        self.channel: Channel[pb.FrontendEnvelope] = Channel(pb.FrontendEnvelope)
        self.streams: dict[int, StreamRecord] = {}
        self.errors: list[str] = []
        self.status: pb.SchedulerStatus | None = None
        self.rejected: str | None = None
        self.goodbye: str | None = None
        self.num_sessions = 0
        self.num_batches = 0
        self.heartbeats = True
        self._fingerprint = fingerprint
        self._incarnation = secrets.token_hex(8)
        self._said_hello = False
        self._last_heard = clock()
        self._lease_s = 2.0
        self._next_heartbeat = 0.0
        self._unsent: list[dict[str, Any]] = []

    def submit(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int = 16,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
        temperature: float = 1.0,
        min_tokens: int = 0,
        overrides: dict[str, Any] | None = None,
        **fields: Any,
    ) -> StreamRecord:
        """A new stream, sent now or when the session starts; `overrides` may spoil fields of the message."""
        stream = len(self.streams) + 1
        message = pb.Submit(
            stream=stream,
            client_request_id=f"request-{stream}",
            prompt_ids=pack(list(prompt_ids)),
            max_tokens=max_tokens,
            sampling=Sampling(
                temperature=temperature,
                top_p=1.0,
                seed=seed,
                min_tokens=min_tokens,
                stop_token_ids=pack(list(stop_token_ids)),
            ),
            **fields,
        )
        for name, value in (overrides or {}).items():
            setattr(message, name, value)
        record = self.streams[stream] = StreamRecord(stream, message)
        if self.channel.epoch:
            self._queue(submit=message)
        return record

    def cancel(self, *streams: int) -> None:
        self._queue(cancel=pb.CancelStreams(streams=pack(list(streams))))

    @property
    def num_open(self) -> int:
        return sum(not record.is_over for record in self.streams.values())

    def _queue(self, **body: Any) -> None:
        self._unsent.append(body)
        self._send()

    def _send(self) -> None:
        while self._unsent:
            frame = self.channel.pack(**self._unsent[0])
            if self.link.send(frame) is not SendOutcome.SENT:
                self.channel.sent_seq -= 1
                return
            self._unsent.pop(0)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Read what is there; whether anything was."""
        now = self.clock()
        if not self._said_hello or now - self._last_heard > self._lease_s:
            self._say_hello(now)
        busy = False
        frame = self.link.recv(timeout_s)
        while frame is not None:
            busy = True
            envelope = self.channel.unpack(frame)
            if envelope is not None:
                self._last_heard = self.clock()
                self._handle(envelope)
            frame = self.link.recv()
        if self.heartbeats and self.channel.epoch and now >= self._next_heartbeat:
            self._next_heartbeat = now + 0.25
            self._queue(heartbeat=pb.FrontendHeartbeat(num_streams=self.num_open))
        self._send()
        return busy

    def _say_hello(self, now: float) -> None:
        hello = pb.FrontendHello(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            incarnation=self._incarnation,
            host="test",
            model_fingerprint=self._fingerprint,
        )
        if self.link.send(self.channel.pack(hello=hello)) is SendOutcome.SENT:
            self._said_hello = True
            self._last_heard = now

    def _handle(self, envelope: pb.FrontendEnvelope) -> None:
        body = envelope.WhichOneof("body")
        if body == "start":
            self._start(envelope)
        elif body == "reject":
            self.rejected = envelope.reject.reason
        elif body == "goodbye":
            self.goodbye = envelope.goodbye.reason
        elif envelope.epoch != self.channel.epoch:
            self.errors.append(f"{body} of epoch {envelope.epoch}")
        elif body == "status":
            self.status = envelope.status
        elif body == "tokens":
            self._take_tokens(envelope.tokens)
        elif body in ("accepted", "rejected", "ended"):
            self._take_answer(body, getattr(envelope, body))

    def _start(self, envelope: pb.FrontendEnvelope) -> None:
        self.channel.open(envelope.epoch)
        self.channel.received_seq = envelope.seq
        self.num_sessions += 1
        self._lease_s = envelope.start.lease_ms / 1000
        self.status = envelope.start.status
        self._unsent.clear()
        for record in self.streams.values():
            if not record.is_over:
                message = pb.Submit()
                message.CopyFrom(record.message)
                message.emitted_ids = pack(record.ids)
                self._queue(submit=message)

    def _take_answer(self, body: str, answer: Any) -> None:
        record = self.streams.get(answer.stream)
        if record is None or record.is_over:
            self.errors.append(f"{body} for stream {answer.stream}, which is over or never was")
        elif body == "accepted":
            record.num_accepted += 1
        elif body == "rejected":
            record.rejected = answer
        else:
            record.ended = answer
            if answer.num_output_tokens != len(record.ids) and answer.error == pb.STREAM_ERROR_UNSPECIFIED:
                self.errors.append(f"stream {answer.stream}: {len(record.ids)} ids of {answer.num_output_tokens}")

    def _take_tokens(self, batch: pb.TokenBatch) -> None:
        self.num_batches += 1
        streams, first_index = unpack(batch.streams), unpack(batch.first_index)
        counts = unpack(batch.counts) if batch.counts else [1] * len(streams)
        token_ids = unpack(batch.token_ids)
        position = 0
        for stream, first, count in zip(streams, first_index, counts, strict=True):
            record = self.streams[stream]
            run = token_ids[position : position + count]
            position += count
            if record.is_over or not record.num_accepted:
                self.errors.append(f"tokens for stream {stream}, which is over or not accepted")
            known = len(record.ids)
            if first > known:
                self.errors.append(f"stream {stream}: index {first} after {known}")
                continue
            record.num_doubled += min(count, known - first)
            record.ids += run[known - first :]
        if position != len(token_ids):
            self.errors.append(f"{len(token_ids)} ids for {position}")
