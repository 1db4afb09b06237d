"""The options of the real sockets, read back, and what the cheap ones do. docs/wire.md has the figures."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pagemill import zmq_links
from pagemill.framing import MAX_FRAME_BYTES
from pagemill.links import SendOutcome
from pagemill.zmq_links import EXECUTOR_BOUND, GATEWAY_BOUND, ZmqHub, ZmqPeer, new_identity

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)


@pytest.fixture
def hub(socket_dir: Path) -> Iterator[ZmqHub]:
    hub = ZmqHub(f"ipc://{socket_dir}/h.sock", role="executor", bound=EXECUTOR_BOUND)
    yield hub
    hub.close()


@pytest.fixture
def peer(hub: ZmqHub) -> Iterator[ZmqPeer]:
    peer = ZmqPeer(hub.endpoint, new_identity("executor", "a"))
    yield peer
    peer.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (zmq.MAXMSGSIZE, 64 * 1024 * 1024),
        (zmq.LINGER, 0),
        (zmq.HEARTBEAT_IVL, 200),
        (zmq.HEARTBEAT_TIMEOUT, 600),
        (zmq.HEARTBEAT_TTL, 600),
        (zmq.HANDSHAKE_IVL, 2000),
    ],
)
def test_both_ends_have_the_option(hub: ZmqHub, peer: ZmqPeer, option: int, value: int) -> None:
    assert hub._socket.getsockopt(option) == value
    assert peer._socket.getsockopt(option) == value


def test_queues_have_the_bound_of_their_role(hub: ZmqHub, peer: ZmqPeer, socket_dir: Path) -> None:
    gateways = ZmqHub(f"ipc://{socket_dir}/g.sock", role="gateway", bound=GATEWAY_BOUND)
    for sock, bound in ((hub._socket, 64), (gateways._socket, 1000), (peer._socket, 1000)):
        assert (sock.getsockopt(zmq.SNDHWM), sock.getsockopt(zmq.RCVHWM)) == (bound, bound)
    gateways.close()


def test_peer_sends_to_a_connection_only_and_comes_back_soon(peer: ZmqPeer) -> None:
    options = (zmq.IMMEDIATE, zmq.RECONNECT_IVL, zmq.RECONNECT_IVL_MAX)
    assert [peer._socket.getsockopt(option) for option in options] == [1, 50, 1000]


def raw(socket_dir: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(os.fspath(socket_dir / "h.sock"))
    return sock


def read_until_closed(sock: socket.socket) -> bytes:
    """All that comes before the other side closes; a timeout fails."""
    data = b""
    try:
        while piece := sock.recv(4096):
            data += piece
    except ConnectionResetError:
        pass
    return data


def handshake(sock: socket.socket, identity: bytes) -> None:
    """Greeting and READY of a DEALER, each answered before more is sent, as libzmq wants it."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        body += bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    sock.sendall(GREETING)
    data = b""
    while len(data) < len(GREETING):
        data += sock.recv(4096)
    sock.sendall(b"\x04" + bytes([len(body)]) + body)
    while b"READY" not in data:
        data += sock.recv(4096)


def test_announcing_a_frame_above_the_bound_ends_the_connection(hub: ZmqHub, socket_dir: Path) -> None:
    for size, is_cut in ((MAX_FRAME_BYTES + 1, True), (MAX_FRAME_BYTES, False)):
        with raw(socket_dir) as sock:
            handshake(sock, new_identity("executor", "big"))
            sock.sendall(b"\x02" + size.to_bytes(8, "big"))
            # A connection that is not cut at once is asked for a sign of life, and cut when none comes.
            assert (b"PING" in read_until_closed(sock)) != is_cut


def test_stranger_that_says_nothing_is_disconnected(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_links, "_HANDSHAKE_IVL_MS", 100)
    hub = ZmqHub(f"ipc://{socket_dir}/h.sock", role="executor", bound=64)
    with raw(socket_dir) as sock:
        read_until_closed(sock)
    hub.close()


@pytest.mark.timeout(20)
def test_closing_does_not_wait_for_a_peer_that_reads_nothing(hub: ZmqHub, socket_dir: Path) -> None:
    identity = new_identity("executor", "deaf")
    sent = 0
    with raw(socket_dir) as sock:
        handshake(sock, identity)
        sock.sendall(b"\x00\x05hello")
        while hub.recv() is None:
            assert hub.num_dropped == 0
        while hub.send(identity, bytes(100_000)) is SendOutcome.SENT:
            sent += 1
        hub.close()
    assert sent >= EXECUTOR_BOUND
