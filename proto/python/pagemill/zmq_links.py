"""Links over ZeroMQ: ROUTER at the scheduler, one DEALER per gateway and executor.

What the options are for (each was seen to fail without it):
MANDATORY turns silent drops into GONE and FULL; HANDOVER lets a peer that reconnects replace its dead connection;
IMMEDIATE keeps a DEALER from queueing for a scheduler that is not there and feeding stale frames to the next one;
LINGER 0 keeps a close from waiting for a dead peer; ZMTP heartbeats find dead hosts and stopped processes (a hung main
thread they do not find: that is what the application's heartbeats are for); MAXMSGSIZE bounds each part that a stranger
may send. The number of parts nothing bounds: libzmq keeps them all until the last one is there, so an endless message
takes memory without end (SECURITY.md).

The descriptor of a ZeroMQ socket is edge-triggered: it announces news once, and *any* call on the socket, a send
included, may swallow the announcement. So never sleep on `fileno()` alone: use `Waiter` here, or drain with `recv`
until None after every wake-up **and** after every send (as `AsyncPeer` does).

A socket belongs to one thread.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterable

import zmq

from pagemill import endpoints
from pagemill.endpoints import EndpointError
from pagemill.framing import MAX_FRAME_BYTES
from pagemill.links import HubLink, PeerId, PeerLink, SendOutcome

EXECUTOR_BOUND = 64
"""Frames queued towards an executor: many times the plans that may be in flight."""
GATEWAY_BOUND = 1000
"""Frames queued towards a gateway; beyond it the scheduler coalesces."""

MIN_LIBZMQ = (4, 3, 5)
MAX_IDENTITY_BYTES = 255

_HEARTBEAT_IVL_MS = 200
_HEARTBEAT_TIMEOUT_MS = 600
_HANDSHAKE_IVL_MS = 2_000
_RECONNECT_IVL_MS = 50
_RECONNECT_IVL_MAX_MS = 1_000
_MAX_DROPS_PER_RECV = 256


def new_identity(role: str, name: str) -> PeerId:
    """`role/name/incarnation` with a fresh random incarnation. Raises ValueError for parts that do not fit."""
    identity = f"{role}/{name}/{secrets.token_hex(8)}".encode("ascii", "strict")
    if not is_identity(identity, role):
        raise ValueError(f"Got {role = }, {name = } but expected visible ASCII without '/', at most 128 characters")
    return PeerId(identity)


def is_identity(identity: bytes, role: str) -> bool:
    """Whether `identity` is one of `new_identity(role, …)`'s form."""
    parts = identity.split(b"/")
    return (
        len(identity) <= MAX_IDENTITY_BYTES
        and len(parts) == 3
        and parts[0] == role.encode()
        and all(0 < len(part) <= 128 and all(33 <= byte <= 126 for byte in part) for part in parts)
    )


def _new_context() -> zmq.Context[zmq.Socket[bytes]]:
    if zmq.zmq_version_info() < MIN_LIBZMQ:  # older ones can be crashed by strangers
        raise RuntimeError(f"Got libzmq {zmq.zmq_version()} but expected at least {'.'.join(map(str, MIN_LIBZMQ))}")
    return zmq.Context()


def _set_common(sock: zmq.Socket[bytes], bound: int) -> None:
    for option, value in (
        (zmq.SNDHWM, bound),
        (zmq.RCVHWM, bound),
        (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        (zmq.LINGER, 0),
        (zmq.HEARTBEAT_IVL, _HEARTBEAT_IVL_MS),
        (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
        (zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS),
        (zmq.HANDSHAKE_IVL, _HANDSHAKE_IVL_MS),
        (zmq.IPV6, 1),
    ):
        sock.setsockopt(option, value)


class ZmqHub:
    """A bound `HubLink`. Frames that are not one part from a peer of `role` are dropped and counted.

    `endpoint` is the address that was bound (with the port that "0" became). Raises EndpointError. A peer whose frames
    are not read with `recv` stays FULL instead of becoming GONE when it dies: its end comes behind them.
    """

    def __init__(self, endpoint: str, *, role: str, bound: int, insecure: bool = False) -> None:
        checked = endpoints.parse(endpoint, insecure=insecure)
        address = endpoints.bind_address(checked)
        self._role = role
        self._known: dict[bytes, bool] = {}
        self.num_dropped = 0
        self._claim = endpoints.IpcClaim(checked.path) if checked.path is not None else None
        self._context = _new_context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            _set_common(self._socket, bound)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._socket.bind(address)
            if checked.path is not None:
                os.chmod(checked.path, 0o600)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"endpoint {endpoint!r}: cannot be bound: {error.strerror}") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: PeerId, frame: bytes) -> SendOutcome:
        """As `HubLink.send`."""
        if len(frame) > MAX_FRAME_BYTES:  # the peer would cut the connection
            raise ValueError(f"Got a frame of {len(frame)} bytes but expected at most {MAX_FRAME_BYTES}")
        try:
            self._socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return SendOutcome.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return SendOutcome.GONE
            raise
        return SendOutcome.SENT

    def recv(self) -> tuple[PeerId, bytes] | None:
        """As `HubLink.recv`. Returns None also after many dropped frames in a row, so that strangers cost little."""
        for _ in range(_MAX_DROPS_PER_RECV):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(parts) == 2 and self._is_known(parts[0]):
                return PeerId(parts[0]), parts[1]
            self.num_dropped += 1
        return None

    def _is_known(self, identity: bytes) -> bool:
        known = self._known.get(identity)
        if known is None:
            if len(self._known) >= 4096:  # strangers may come under any number of names
                self._known.clear()
            known = self._known[identity] = is_identity(identity, self._role)
        return known

    def register(self, poller: zmq.Poller) -> None:
        """Let `Waiter` poll the socket itself, which has no edge trap."""
        poller.register(self._socket, zmq.POLLIN)

    def fileno(self) -> int:
        """As `HubLink.fileno`; edge-triggered, see the head of this file."""
        return int(self._socket.FD)

    def close(self, linger_s: float = 0.0) -> None:
        """As `HubLink.close`. Returns when the socket file is gone, so the endpoint can be bound again at once."""
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()
        if self._claim is not None:
            self._claim.release()
            self._claim = None


class ZmqPeer:
    """A connected `PeerLink`; it reconnects by itself, and FULL is the answer while there is no connection."""

    def __init__(self, endpoint: str, identity: PeerId, *, bound: int = GATEWAY_BOUND, insecure: bool = False) -> None:
        checked = endpoints.parse(endpoint, insecure=insecure)
        self.identity = identity
        self.num_dropped = 0
        self._context = _new_context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            _set_common(self._socket, bound)
            self._socket.setsockopt(zmq.IDENTITY, identity)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_IVL_MS)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_IVL_MAX_MS)
            self._socket.connect(checked.text)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"endpoint {endpoint!r}: cannot be connected to: {error.strerror}") from error

    def send(self, frame: bytes) -> SendOutcome:
        """As `PeerLink.send`."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"Got a frame of {len(frame)} bytes but expected at most {MAX_FRAME_BYTES}")
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return SendOutcome.FULL
        return SendOutcome.SENT

    def recv(self, timeout_s: float = 0.0) -> bytes | None:
        """As `PeerLink.recv`."""
        if timeout_s > 0 and not self._socket.poll(max(1, int(timeout_s * 1000)), zmq.POLLIN):
            return None
        for _ in range(_MAX_DROPS_PER_RECV):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(parts) == 1:
                return parts[0]
            self.num_dropped += 1
        return None

    def ready(self) -> bool:
        """Whether `recv` would return a frame now."""
        return bool(int(self._socket.EVENTS) & zmq.POLLIN)

    def register(self, poller: zmq.Poller) -> None:
        """As `ZmqHub.register`."""
        poller.register(self._socket, zmq.POLLIN)

    def fileno(self) -> int:
        """As `PeerLink.fileno`; edge-triggered, see the head of this file."""
        return int(self._socket.FD)

    def close(self, linger_s: float = 0.0) -> None:
        """As `PeerLink.close`."""
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()


class AsyncPeer:
    """A `ZmqPeer` for an asyncio loop: made and used inside the running loop, by one reader."""

    def __init__(self, peer: ZmqPeer) -> None:
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._closed = False
        self._fd = peer.fileno()
        self._loop.add_reader(self._fd, self._news.set)

    def send(self, frame: bytes) -> SendOutcome:
        """As `PeerLink.send`: at once, never waits."""
        outcome = self._peer.send(frame)
        if self._peer.ready():  # the send may have swallowed the announcement of a frame
            self._news.set()
        return outcome

    async def recv(self) -> bytes:
        """The next frame. Raises ConnectionAbortedError once closed; cancelling it loses no frame."""
        while True:
            self._news.clear()
            if self._closed:
                raise ConnectionAbortedError("the link is closed")
            frame = self._peer.recv()
            if frame is not None:
                return frame
            await self._news.wait()

    def recv_nowait(self) -> bytes | None:
        """The next frame if one is there."""
        return None if self._closed else self._peer.recv()

    def close(self, linger_s: float = 0.0) -> None:
        """Stop; a waiting `recv` ends. Blocks the loop for at most `linger_s`."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._news.set()
            self._peer.close(linger_s)


class Waiter:
    """Sleeps until a link or descriptor has something; works for ZeroMQ and loopback links alike."""

    def __init__(self, links: Iterable[HubLink | PeerLink], fds: Iterable[int] = ()) -> None:
        self._poller = zmq.Poller()
        for link in links:
            if isinstance(link, ZmqHub | ZmqPeer):
                link.register(self._poller)
            else:
                self._poller.register(link.fileno(), zmq.POLLIN)
        for fd in fds:
            self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Whether something is there; sleeps at most `timeout_s` seconds, rounded up to milliseconds."""
        return bool(self._poller.poll(max(0, int(timeout_s * 1000 + 0.999))))


def wait(links: Iterable[HubLink | PeerLink], timeout_s: float) -> bool:
    """`Waiter` for a single use."""
    return Waiter(links).wait(timeout_s)
