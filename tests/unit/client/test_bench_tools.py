"""The measuring tools themselves: a delay that only delays, workloads that never change."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import zmq

from bench import workloads
from bench.delay_proxy import DelayProxy

IDS = list(range(50_000))
W2_PROMPT_TOKENS = 19437
W2_OUTPUT_TOKENS = 4962
DIGESTS = {
    "W1": "4d1e57a4623b2a79",
    "W2": "bd13874b94312f3f",
    "W3": "534745beb72c92ab",
    "W4": "0da0a6427ed39a6e",
    "W5r1": "dd9476e92a40e1b9",
    "W5r8": "1850a67b3bdaa483",
}


def test_the_proxy_keeps_identity_and_order_and_only_delays(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = Path(tmp_path_factory.mktemp("p"))
    near, far = f"ipc://{folder}/n", f"ipc://{folder}/f"
    context = zmq.Context()
    hub = context.socket(zmq.ROUTER)
    hub.bind(near)
    proxy = DelayProxy(far, near, 0.05)
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            proxy.turn()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        peers = [context.socket(zmq.DEALER) for _ in range(2)]
        for number, peer in enumerate(peers):
            peer.setsockopt(zmq.IDENTITY, b"executor/%d" % number)
            peer.connect(far)
        sent = time.monotonic()
        for i in range(20):
            peers[i % 2].send(b"%d" % i)
        seen = [receive(hub) for _ in range(20)]
        assert time.monotonic() - sent >= 0.05
        for number in range(2):
            mine = [int(body) for identity, body in seen if identity == b"executor/%d" % number]
            assert mine == list(range(number, 20, 2))
        sent = time.monotonic()
        hub.send_multipart([b"executor/1", b"plan"])
        assert receive(peers[1]) == [b"plan"]
        assert time.monotonic() - sent >= 0.05
    finally:
        done.set()
        peers[0].send(b"wake up")
        thread.join(timeout=30)
        proxy.close()
        context.destroy(linger=0)
    assert not thread.is_alive()


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(10_000)
    return socket.recv_multipart()


@pytest.mark.parametrize(
    ("name", "num", "prompts", "outputs"),
    [
        ("W1", 1, (128, 128), (128, 128)),
        ("W2", 64, (32, 512), (32, 128)),
        ("W3", 1, (2048, 2048), (1, 1)),
        ("W4", 32, (1056, 1056), (32, 32)),
        ("W5r4", 40, (32, 512), (32, 128)),
    ],
)
def test_workloads_have_their_shape(name: str, num: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> None:
    repetitions = workloads.make(name, IDS)
    assert len(repetitions) == workloads.REPETITIONS
    for requests in repetitions:
        assert len(requests) == num
        assert all(prompts[0] <= len(request.ids) <= prompts[1] for request in requests)
        assert all(outputs[0] <= request.n_out <= outputs[1] for request in requests)
        assert all((request.at is not None) == name.startswith("W5") for request in requests)
    assert len({workloads.digest(requests) for requests in repetitions}) == workloads.REPETITIONS


def test_w2_has_the_same_lengths_in_every_repetition() -> None:
    shapes = {tuple((len(r.ids), r.n_out) for r in requests) for requests in workloads.make("W2", IDS)}
    assert len(shapes) == 1
    assert sum(prompt for prompt, _ in next(iter(shapes))) == W2_PROMPT_TOKENS
    assert sum(out for _, out in next(iter(shapes))) == W2_OUTPUT_TOKENS


def test_workloads_never_change() -> None:
    """Figures of different days are compared by these names: a change would make them meaningless."""
    made = {name: workloads.digest(workloads.make(name, IDS)[0]) for name in DIGESTS}
    assert made == DIGESTS


def test_an_unknown_workload_is_an_error() -> None:
    with pytest.raises(KeyError):
        workloads.make("W5r3", IDS)
