"""Real sockets: bounds, identities, dead and doubled peers, strangers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from pagemill.endpoints import EndpointError
from pagemill.framing import MAX_FRAME_BYTES
from pagemill.links import PeerId, SendOutcome
from pagemill.loopback import LoopbackHub
from pagemill.zmq_links import AsyncPeer, Waiter, ZmqHub, ZmqPeer, is_identity, new_identity, wait


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)


@pytest.fixture
def hub(socket_dir: Path) -> Iterator[ZmqHub]:
    hub = ZmqHub(f"ipc://{socket_dir}/h.sock", role="executor", bound=64)
    yield hub
    hub.close()


@pytest.fixture
def connect(hub: ZmqHub) -> Iterator[Callable[..., ZmqPeer]]:
    peers: list[ZmqPeer] = []

    def make(identity: PeerId | None = None, endpoint: str | None = None, bound: int = 64) -> ZmqPeer:
        peer = ZmqPeer(endpoint or hub.endpoint, identity or new_identity("executor", "a"), bound=bound)
        peers.append(peer)
        return peer

    yield make
    for peer in peers:
        peer.close()


def recv(hub: ZmqHub) -> tuple[PeerId, bytes]:
    waiter = Waiter([hub])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        item = hub.recv()
        if item is not None:
            return item
        waiter.wait(0.1)
    raise AssertionError("nothing came")


def meet(hub: ZmqHub, peer: ZmqPeer) -> None:
    until(lambda: peer.send(b"hello") is SendOutcome.SENT)
    assert recv(hub) == (peer.identity, b"hello")


def test_identities() -> None:
    assert is_identity(new_identity("executor", "gpu-1"), "executor")
    assert new_identity("executor", "a") != new_identity("executor", "a")
    for bad in (b"", b"executor", b"executor/a", b"gateway/a/b", b"executor//b", b"executor/a/b/c", b"executor/\x00/b"):
        assert not is_identity(bad, "executor")
    for name in ("", "a/b", "a b", "x" * 200):
        with pytest.raises(ValueError, match="expected"):
            new_identity("executor", name)


def test_frames_keep_their_order_both_ways(hub: ZmqHub, connect: Callable[..., ZmqPeer]) -> None:
    peer = connect()
    meet(hub, peer)
    frames = [bytes([i]) * (i * 500) for i in range(50)]
    for frame in frames:
        assert hub.send(peer.identity, frame) is SendOutcome.SENT
    assert [peer.recv(5) for _ in frames] == frames
    for frame in frames:
        assert peer.send(frame) is SendOutcome.SENT
    assert [recv(hub)[1] for _ in frames] == frames
    assert hub.recv() is None
    assert peer.recv() is None


def test_full_is_an_answer_and_nothing_in_between_is_lost(hub: ZmqHub, connect: Callable[..., ZmqPeer]) -> None:
    peer = connect()
    meet(hub, peer)
    sent = 0
    while hub.send(peer.identity, b"%08d" % sent + bytes(10_000)) is SendOutcome.SENT:
        sent += 1
        assert sent < 5_000, "never full"
    got = []
    while (frame := peer.recv(0.5)) is not None:
        got.append(int(frame[:8]))
    assert got == list(range(sent))
    until(lambda: hub.send(peer.identity, b"again") is SendOutcome.SENT)


def test_peer_that_was_never_there_or_left_is_gone(hub: ZmqHub, connect: Callable[..., ZmqPeer]) -> None:
    assert hub.send(new_identity("executor", "nobody"), b"x") is SendOutcome.GONE
    peer = ZmqPeer(hub.endpoint, new_identity("executor", "leaver"))
    meet(hub, peer)
    peer.close()
    until(lambda: hub.send(peer.identity, b"x") is SendOutcome.GONE)


def test_new_connection_of_an_identity_takes_over(hub: ZmqHub, connect: Callable[..., ZmqPeer]) -> None:
    identity = new_identity("executor", "twice")
    first = connect(identity)
    meet(hub, first)
    second = connect(identity)
    meet(hub, second)
    assert hub.send(identity, b"for the second") is SendOutcome.SENT
    assert second.recv(5) == b"for the second"
    assert first.recv(0.05) is None


def test_stopped_process_is_found_gone(hub: ZmqHub) -> None:
    code = (
        "import sys, time\nfrom pagemill.zmq_links import ZmqPeer, new_identity\n"
        "peer = ZmqPeer(sys.argv[1], new_identity('executor', 'frozen'))\n"
        "while peer.send(b'hello').value != 'sent': time.sleep(0.01)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, hub.endpoint])
    try:
        identity, _ = recv(hub)
        os.kill(process.pid, 19)  # SIGSTOP
        until(lambda: hub.recv() is None and hub.send(identity, b"x") is SendOutcome.GONE)
    finally:
        process.kill()
        process.wait(10)


def test_peer_finds_a_restarted_hub_and_no_frame_waits_for_it(socket_dir: Path) -> None:
    endpoint = f"ipc://{socket_dir}/r.sock"
    peer = ZmqPeer(endpoint, new_identity("executor", "a"))
    assert peer.send(b"too early") is SendOutcome.FULL
    for _ in range(3):
        hub = ZmqHub(endpoint, role="executor", bound=64)
        meet(hub, peer)
        hub.close()
        assert not Path(f"{socket_dir}/r.sock").exists()
        until(lambda: peer.send(b"lost with its connection, or not taken") is SendOutcome.FULL)
    peer.close()


def test_second_hub_on_an_endpoint_is_refused_and_the_first_works_on(
    hub: ZmqHub, connect: Callable[..., ZmqPeer]
) -> None:
    with pytest.raises(EndpointError, match="already listening"):
        ZmqHub(hub.endpoint, role="executor", bound=64)
    meet(hub, connect())


def test_tcp_binds_a_free_port_and_refuses_a_taken_one() -> None:
    hub = ZmqHub("tcp://127.0.0.1:0", role="executor", bound=64, insecure=True)
    peer = ZmqPeer(hub.endpoint, new_identity("executor", "a"), insecure=True)
    meet(hub, peer)
    with pytest.raises(EndpointError, match="cannot be bound"):
        ZmqHub(hub.endpoint, role="executor", bound=64, insecure=True)
    with pytest.raises(EndpointError, match="--insecure"):
        ZmqPeer(hub.endpoint, new_identity("executor", "b"))
    peer.close()
    hub.close()


def test_socket_file_is_private(hub: ZmqHub, socket_dir: Path) -> None:
    assert (socket_dir / "h.sock").stat().st_mode & 0o777 == 0o600


def test_frames_above_the_bound_are_not_sent(hub: ZmqHub, connect: Callable[..., ZmqPeer]) -> None:
    peer = connect()
    for send in (peer.send, lambda frame: hub.send(peer.identity, frame)):
        with pytest.raises(ValueError, match="at most"):
            send(bytes(MAX_FRAME_BYTES + 1))


def stranger(hub: ZmqHub, identity: bytes | None) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    if identity is not None:
        sock.setsockopt(zmq.IDENTITY, identity)
    sock.connect(hub.endpoint)
    return context, sock


def test_strangers_and_wrong_shapes_are_dropped_and_counted(hub: ZmqHub, connect: Callable[..., ZmqPeer]) -> None:
    for identity in (None, b"gateway/a/b", b"executor"):
        context, sock = stranger(hub, identity)
        sock.send(b"x")
        until(lambda before=hub.num_dropped: hub.recv() is None and hub.num_dropped > before)  # type: ignore[misc]
        sock.close()
        context.term()
    context, sock = stranger(hub, new_identity("executor", "parts"))
    sock.send_multipart([b"a", b"b", b"c"])
    sock.send_multipart([b"", b"b"])
    until(lambda: hub.recv() is None and hub.num_dropped == 5)
    sock.close()
    context.term()
    meet(hub, connect())


def test_garbage_on_the_port_hurts_nobody(hub: ZmqHub, connect: Callable[..., ZmqPeer], socket_dir: Path) -> None:
    peer = connect()
    meet(hub, peer)
    rng = random.Random(1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    pieces = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        greeting,
        greeting[:20],
        greeting + b"\x04\x05\x05READY",
        greeting + b"\x02" + (8 * 2**30).to_bytes(8, "big"),  # the header of a frame of 8 GiB
        b"\x01\x00",  # ZMTP 1.0
    ]
    for i in range(300):
        with socket.socket(socket.AF_UNIX) as raw:
            until(lambda raw=raw: raw.connect_ex(os.fspath(socket_dir / "h.sock")) == 0)  # type: ignore[misc]
            data = pieces[i % len(pieces)] + rng.randbytes(rng.randrange(64))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                raw.sendall(data)
    assert hub.recv() is None
    assert peer.send(b"still there") is SendOutcome.SENT
    assert recv(hub) == (peer.identity, b"still there")
    assert hub.send(peer.identity, b"yes") is SendOutcome.SENT
    assert peer.recv(5) == b"yes"


def test_waiter_wakes_for_any_link_and_never_misses_a_frame(hub: ZmqHub, connect: Callable[..., ZmqPeer]) -> None:
    loopback = LoopbackHub()
    other = loopback.connect(new_identity("gateway", "g"))
    peer = connect()
    meet(hub, peer)
    read_fd, write_fd = os.pipe()
    waiter = Waiter([hub, loopback], [read_fd])
    assert not waiter.wait(0)
    for send, take in (
        (lambda: peer.send(b"x"), hub.recv),
        (lambda: other.send(b"x"), loopback.recv),
        (lambda: os.write(write_fd, b"x"), lambda: os.read(read_fd, 1)),
    ):
        # A frame that arrives just before the sleep, with a send in between that swallows the descriptor's edge.
        send()
        hub.send(peer.identity, b"y")
        assert waiter.wait(5)
        take()
        assert loopback.recv() is None
        assert not waiter.wait(0)
    assert wait([peer], 5)
    os.close(read_fd)
    os.close(write_fd)
    other.close()
    loopback.close()


async def test_async_peer_receives_whatever_is_sent_in_between(socket_dir: Path) -> None:
    hub = ZmqHub(f"ipc://{socket_dir}/a.sock", role="gateway", bound=1000)
    answers = threading.Thread(target=_echo, args=(hub, 500), daemon=True)
    answers.start()
    peer = AsyncPeer(ZmqPeer(hub.endpoint, new_identity("gateway", "g")))
    try:
        while peer.send(b"0") is not SendOutcome.SENT:
            await asyncio.sleep(0.005)
        for i in range(1, 500):
            # Sending and receiving interleave without a pause: each send may swallow the news of an answer.
            assert peer.send(b"%d" % i) is SendOutcome.SENT
            if i % 3 == 0:
                await asyncio.sleep(0)
        got = [int(await asyncio.wait_for(peer.recv(), 30)) for _ in range(500)]
        assert got == list(range(500))
        assert peer.recv_nowait() is None
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(peer.recv(), 0.02)
        waiting = asyncio.create_task(peer.recv())
        await asyncio.sleep(0)
    finally:
        peer.close()
        answers.join(10)
        hub.close()
    with pytest.raises(ConnectionAbortedError):
        await waiting


def _echo(hub: ZmqHub, count: int) -> None:
    for _ in range(count):
        identity, frame = recv(hub)
        hub.send(identity, frame)
