"""In-process links for tests: the same bounds and outcomes as sockets, no sockets."""

from __future__ import annotations

import threading
import time
from collections import deque

from pagemill.links import PeerId, SendOutcome
from pagemill.wake import WakePipe


class LoopbackHub:
    """A `HubLink` whose peers live in this process; `connect` makes one. Safe between threads."""

    def __init__(self, bound: int = 64) -> None:
        self.num_dropped = 0
        self._bound = bound
        self._lock = threading.Condition()
        self._inbox: deque[tuple[PeerId, bytes]] = deque()
        self._peers: dict[PeerId, LoopbackPeer] = {}
        self._wakeup = WakePipe()

    def connect(self, peer: PeerId) -> LoopbackPeer:
        """A new link for `peer`; an earlier one of the same identity is cut off (HANDOVER)."""
        with self._lock:
            link = LoopbackPeer(self, peer)
            self._peers[peer] = link
            return link

    def send(self, peer: PeerId, frame: bytes) -> SendOutcome:
        """As `HubLink.send`."""
        with self._lock:
            link = self._peers.get(peer)
            if link is None:
                return SendOutcome.GONE
            if len(link._inbox) >= self._bound:
                return SendOutcome.FULL
            link._inbox.append(frame)
            link._wakeup.set()
            self._lock.notify_all()
            return SendOutcome.SENT

    def recv(self) -> tuple[PeerId, bytes] | None:
        """As `HubLink.recv`."""
        with self._lock:
            if not self._inbox:
                self._wakeup.clear()
                return None
            return self._inbox.popleft()

    def fileno(self) -> int:
        """As `HubLink.fileno`."""
        return self._wakeup.fd

    def close(self, linger_s: float = 0.0) -> None:
        """As `HubLink.close`."""
        self._wakeup.close()


class LoopbackPeer:
    """A `PeerLink` made by `LoopbackHub.connect`."""

    def __init__(self, hub: LoopbackHub, peer: PeerId) -> None:
        self._hub = hub
        self._peer = peer
        self._inbox: deque[bytes] = deque()
        self._wakeup = WakePipe()

    def send(self, frame: bytes) -> SendOutcome:
        """As `PeerLink.send`."""
        hub = self._hub
        with hub._lock:
            if hub._peers.get(self._peer) is not self:
                return SendOutcome.GONE
            if len(hub._inbox) >= hub._bound * max(1, len(hub._peers)):
                return SendOutcome.FULL
            hub._inbox.append((self._peer, frame))
            hub._wakeup.set()
            return SendOutcome.SENT

    def recv(self, timeout_s: float = 0.0) -> bytes | None:
        """As `PeerLink.recv`."""
        deadline = time.monotonic() + timeout_s
        with self._hub._lock:
            while not self._inbox:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._wakeup.clear()
                    return None
                self._hub._lock.wait(left)
            return self._inbox.popleft()

    def fileno(self) -> int:
        """As `PeerLink.fileno`."""
        return self._wakeup.fd

    def close(self, linger_s: float = 0.0) -> None:
        """As `PeerLink.close`; the hub then finds the peer gone."""
        with self._hub._lock:
            if self._hub._peers.get(self._peer) is self:
                del self._hub._peers[self._peer]
            self._wakeup.close()
