"""Stands between executors and a scheduler and holds every frame for at least some milliseconds, each way.

    python -m bench.delay_proxy --listen ipc:///tmp/x/far.sock --connect ipc:///tmp/x/near.sock --delay-ms 5

A wire that is longer, not thinner: frames keep their order and any number may be under way. To the scheduler each
executor keeps its own identity, because the proxy opens one connection per executor under the executor's name.

A line `DELAY ECHO` on standard input sets both, in milliseconds, for the frames that come after it. With an echo the
proxy wakes once more that long after it has sent a frame, to do nothing: a control for what its waking alone does to
processes that share its CPUs, and which a longer wire would not do.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, TextIO

import zmq


@dataclass(slots=True)
class Held:
    """Frames due at a time (monotonic, in seconds). They leave first in, first out, even when the delay has shrunk."""

    due: float
    socket: zmq.Socket[bytes] | None
    """None: an echo."""
    frames: list[bytes]


class DelayProxy:
    """One listening ROUTER, one DEALER per executor. `turn` moves what is there and what is due."""

    def __init__(self, listen: str, connect: str, delay_s: float) -> None:
        self._context = zmq.Context()
        self._connect = connect
        self._delay_s = delay_s
        self._front = self._context.socket(zmq.ROUTER)
        self._front.set_hwm(0)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._front.bind(listen)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._held: deque[Held] = deque()
        self._orders: TextIO | None = None
        self._echo_s = 0.0

    def obey(self, orders: TextIO) -> None:
        """Take a new delay and echo from each line of `orders` until its end."""
        self._orders = orders
        self._poller.register(orders.fileno(), zmq.POLLIN)

    def turn(self) -> None:
        """Wait for the next frame or the next due time; then receive all and send what is due."""
        # Rounded up, since zmq counts whole milliseconds: frames are held at least as long as asked, never spun for.
        timeout_ms = math.ceil(max(0.0, self._held[0].due - time.monotonic()) * 1e3) if self._held else None
        ready: dict[Any, int] = dict(self._poller.poll(timeout_ms))
        now = time.monotonic()
        if self._orders is not None and self._orders.fileno() in ready:
            self._take_order(self._orders)
        if self._front in ready:
            identity, *frames = self._front.recv_multipart()
            self._held.append(Held(now + self._delay_s, self._back(identity), frames))
        for identity, back in self._backs.items():
            if back in ready:
                self._held.append(Held(now + self._delay_s, self._front, [identity, *back.recv_multipart()]))
        while self._held and self._held[0].due <= now:
            held = self._held.popleft()
            if held.socket is not None:
                held.socket.send_multipart(held.frames)
                if self._echo_s:
                    self._held.append(Held(now + self._echo_s, None, []))

    def close(self) -> None:
        """Drop what is held."""
        self._context.destroy(linger=0)

    def _take_order(self, orders: TextIO) -> None:
        line = orders.readline()
        if line:
            self._delay_s, self._echo_s = (float(number) / 1e3 for number in line.split())
        else:
            self._poller.unregister(orders.fileno())
            self._orders = None

    def _back(self, identity: bytes) -> zmq.Socket[bytes]:
        back = self._backs.get(identity)
        if back is None:
            back = self._backs[identity] = self._context.socket(zmq.DEALER)
            back.set_hwm(0)
            back.setsockopt(zmq.IDENTITY, identity)
            back.connect(self._connect)
            self._poller.register(back, zmq.POLLIN)
        return back


def main() -> None:
    parser = argparse.ArgumentParser(description="delay frames between executors and a scheduler, each way")
    parser.add_argument("--listen", required=True, help="endpoint for executors")
    parser.add_argument("--connect", required=True, help="the scheduler's executor endpoint")
    parser.add_argument("--delay-ms", type=float, required=True, help="delay of each frame in each direction")
    args = parser.parse_args()
    proxy = DelayProxy(args.listen, args.connect, args.delay_ms / 1e3)
    proxy.obey(sys.stdin)
    try:
        while True:
            proxy.turn()
    except KeyboardInterrupt:
        proxy.close()


if __name__ == "__main__":
    main()
