"""What a gateway needs of its link to the scheduler, and what it says of itself there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagemill.engine.v1.frontend_pb2 import FrontendHello
from pagemill.framing import PROTOCOL
from pagemill.links import SendOutcome


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


@dataclass(frozen=True, slots=True)
class Identity:
    """What a hello says about this process."""

    version: str
    incarnation: str
    host: str
    model_fingerprint: str
    schema_hash: str = ""

    def hello(self) -> FrontendHello:
        """The message."""
        return FrontendHello(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            schema_hash=self.schema_hash,
            version=self.version,
            incarnation=self.incarnation,
            host=self.host,
            model_fingerprint=self.model_fingerprint,
        )
