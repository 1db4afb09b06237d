"""Stamps and judges envelopes: protocol, epoch, sequence numbers. One `Channel` per link and peer.

A frame that does not pass is dropped and counted, never raised: whatever arrives on a socket is expected input.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError

from pagemill.engine.v1.executor_pb2 import ExecutorEnvelope
from pagemill.engine.v1.frontend_pb2 import FrontendEnvelope

PROTOCOL = 1
"""Major version spoken by this build; also the only one it understands."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Frames above this are never sent, and never accepted by a socket (ZMQ_MAXMSGSIZE)."""

E = TypeVar("E", ExecutorEnvelope, FrontendEnvelope)


class Drop(Enum):
    """Why a frame was dropped; the label of `stale_messages_total`."""

    MALFORMED = "malformed"
    PROTOCOL = "protocol"
    STALE_EPOCH = "stale_epoch"
    DUPLICATE = "duplicate"


class Channel(Generic[E]):
    """One direction pair with one peer: numbers what leaves, judges what comes.

    `epoch` is 0 until `open` is called. A frame of a newer epoch passes without changing it (the receiver looks at
    the body and calls `open`); a frame of an older one is dropped. Gaps in `seq` pass but are counted in `gaps`:
    frames are lost only with a connection, and plans have their own numbers to recover by.
    """

    def __init__(self, envelope_type: type[E]) -> None:
        self._envelope_type: type[E] = envelope_type
        self.epoch = 0
        self.sent_seq = 0
        self.received_seq = 0
        self.gaps = 0
        self.dropped: Counter[Drop] = Counter()

    def open(self, epoch: int) -> None:
        """Begin a session: sequence numbers of both directions start again."""
        self.epoch = epoch
        self.sent_seq = self.received_seq = 0

    def pack(self, **body: Any) -> bytes:
        """Serialise one envelope with the given body field, for example ``pack(plan=plan)``."""
        self.sent_seq += 1
        envelope = self._envelope_type(
            protocol=PROTOCOL, epoch=self.epoch, seq=self.sent_seq, ack=self.received_seq, **body
        )
        return envelope.SerializeToString()

    def unpack(self, frame: bytes) -> E | None:
        """Parse one frame; None if it was dropped (see `dropped`)."""
        envelope = self._envelope_type()
        try:
            envelope.ParseFromString(frame)
        except DecodeError:
            return self._drop(Drop.MALFORMED)
        body = envelope.WhichOneof("body")
        if body is None:
            return self._drop(Drop.MALFORMED)
        if body == "hello":  # negotiates the protocol itself and belongs to no epoch
            self.received_seq = envelope.seq
            return envelope
        return self._judge(envelope)

    def _judge(self, envelope: E) -> E | None:
        if envelope.protocol != PROTOCOL:
            return self._drop(Drop.PROTOCOL)
        if envelope.epoch < self.epoch:
            return self._drop(Drop.STALE_EPOCH)
        if envelope.epoch == self.epoch:
            if envelope.seq <= self.received_seq:
                return self._drop(Drop.DUPLICATE)
            self.gaps += envelope.seq - self.received_seq - 1
            self.received_seq = envelope.seq
        return envelope

    def _drop(self, reason: Drop) -> E | None:
        self.dropped[reason] += 1
        return None
