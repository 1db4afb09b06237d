"""One gateway as the scheduler sees it: its streams and what it is owed; and what its port needs of the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagemill.engine.v1 import frontend_pb2 as pb
from pagemill.framing import Channel
from pagemill.links import PeerId
from scheduler_svc.core.events import TokensEvent
from scheduler_svc.core.params import SeqId
from scheduler_svc.gateway_codec import encode_tokens


@dataclass(frozen=True, slots=True)
class EarlyRefusal:
    """Why no work is taken at all now."""

    error: pb.StreamError
    message: str
    retry_after_ms: int | None = None


class Front(Protocol):
    """What the gateways' side needs to know about the rest of the engine; implemented by `Engine`."""

    def status(self) -> pb.SchedulerStatus:
        """State for readiness and admission."""
        ...

    def refuse_now(self, now: float) -> EarlyRefusal | None:
        """Whether new work is refused whatever it is."""
        ...

    def retry_after_ms(self) -> int:
        """When the queue will probably have been worked off."""
        ...

    def admin(self, operation: int, now: float) -> pb.AdminReply:
        """The answer to an operator's question, of any number; without its id."""
        ...

    def vocab_size(self) -> int | None:
        """Number of token ids, None while unknown."""
        ...

    def executor_fingerprint(self) -> str | None:
        """Model of the executor in use."""
        ...


@dataclass(slots=True)
class GatewaySession:
    """One gateway between a hello and its end. `streams` and `stream_of` are inverse to each other."""

    peer: PeerId
    group: int
    fingerprint: str
    last_heard: float
    next_heartbeat: float
    channel: Channel[pb.FrontendEnvelope] = field(default_factory=lambda: Channel(pb.FrontendEnvelope))
    streams: dict[int, SeqId] = field(default_factory=dict)
    stream_of: dict[SeqId, int] = field(default_factory=dict)
    silent: set[SeqId] = field(default_factory=set)
    """Streams that never had a token."""
    replies: deque[dict[str, Any]] = field(default_factory=deque)
    token_streams: list[int] = field(default_factory=list)
    token_counts: list[int] | None = None
    token_first_index: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    endings: deque[pb.StreamEnded] = field(default_factory=deque)
    unsent: bytes | None = None
    """A packed frame that the link has not taken; it goes first."""

    @property
    def has_pending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self.unsent or self.replies or self.token_streams or self.endings)

    def add_tokens(self, streams: list[int], event: TokensEvent) -> None:
        """Put one step's tokens behind those that wait."""
        if not self.token_streams:  # the usual case: the event's lists are ours now
            self.token_streams, self.token_first_index = streams, event.first_index
            self.token_counts, self.token_ids = event.counts, event.token_ids
            return
        if event.counts is not None or self.token_counts is not None:
            mine = self.token_counts if self.token_counts is not None else [1] * len(self.token_streams)
            self.token_counts = mine + (event.counts if event.counts is not None else [1] * len(streams))
        self.token_streams += streams
        self.token_first_index += event.first_index
        self.token_ids += event.token_ids

    def take_body(self) -> dict[str, Any] | None:
        """The next message to send, as the fields of an envelope; None when nothing waits."""
        if self.replies:
            return self.replies.popleft()
        if self.token_streams:
            batch = encode_tokens(self.token_streams, self.token_counts, self.token_first_index, self.token_ids)
            self.token_streams, self.token_first_index, self.token_ids, self.token_counts = [], [], [], None
            return {"tokens": batch}
        return {"ended": self.endings.popleft()} if self.endings else None
