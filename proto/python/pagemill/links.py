"""The seams between processes: a hub (the scheduler's end) has many peers, a peer link has one hub.

Frames are whole messages as bytes; what they mean is `pagemill.framing`'s business. Sends never block: a bound that
is reached is an answer (`SendOutcome.FULL`), not a wait. Order is total per peer and direction. Delivery is at most
once: a frame may be lost with its connection, never doubled or reordered within one.

Implementations: `pagemill.loopback` (in process, for tests), `pagemill.zmq_links` (ROUTER/DEALER).
"""

from __future__ import annotations

from enum import Enum
from typing import NewType, Protocol

PeerId = NewType("PeerId", bytes)
"""A peer's identity: b"role/name/incarnation", unique per process life."""


class SendOutcome(Enum):
    """What became of a frame."""

    SENT = "sent"
    FULL = "full"
    """The bound is reached; the frame was not taken."""
    GONE = "gone"
    """No such peer is connected; the frame was not taken."""


class HubLink(Protocol):
    """The scheduler's end: bound, with any number of peers."""

    num_dropped: int
    """Frames that were not one part from a peer with an identity of the right form; no caller saw them."""

    def send(self, peer: PeerId, frame: bytes) -> SendOutcome:
        """Queue one frame for a peer without blocking."""
        ...

    def recv(self) -> tuple[PeerId, bytes] | None:
        """The next frame and its sender, or None when nothing is there now."""
        ...

    def fileno(self) -> int:
        """A descriptor that polls readable when something *may* be there; drain with `recv` until None."""
        ...

    def close(self, linger_s: float = 0.0) -> None:
        """Stop; frames already queued get `linger_s` seconds to leave."""
        ...


class PeerLink(Protocol):
    """A gateway's or executor's end: one hub."""

    def send(self, frame: bytes) -> SendOutcome:
        """Queue one frame for the hub without blocking; FULL also while not connected."""
        ...

    def recv(self, timeout_s: float = 0.0) -> bytes | None:
        """The next frame; waits at most `timeout_s` seconds; None when none came."""
        ...

    def fileno(self) -> int:
        """As `HubLink.fileno`."""
        ...

    def close(self, linger_s: float = 0.0) -> None:
        """As `HubLink.close`."""
        ...
