"""A scheduler's end of the link for tests: speaks the wire, plans nothing by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from executor_svc.metrics import ExecutorMetrics
from executor_svc.worker import Exit, Worker, WorkerOptions
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.framing import Channel
from pagemill.links import HubLink, PeerId
from pagemill.loopback import LoopbackHub
from pagemill.zmq_links import wait
from tests.unit.executor.executor_fakes import Bench

DEADLINE_S = 60.0


class MiniScheduler:
    """One hub, one executor."""

    def __init__(self, hub: HubLink) -> None:
        self.hub = hub
        self.peer: PeerId | None = None
        self.channel = Channel(pb.ExecutorEnvelope)
        self.heartbeats: list[pb.Heartbeat] = []
        self.others: list[pb.ExecutorEnvelope] = []

    def send(self, **body: object) -> None:
        self.send_frame(self.channel.pack(**body))

    def send_frame(self, frame: bytes) -> None:
        assert self.peer is not None
        self.hub.send(self.peer, frame)

    def receive(self, *wanted: str, timeout_s: float = DEADLINE_S) -> pb.ExecutorEnvelope:
        """The next message of a wanted kind; heartbeats are kept aside. Everything else is kept in `others`."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            received = self.hub.recv()
            if received is None:
                wait([self.hub], min(left, 0.2))
                continue
            peer, frame = received
            envelope = self.channel.unpack(frame)
            if envelope is None:
                continue
            self.peer = peer
            body = envelope.WhichOneof("body")
            if body == "heartbeat":
                self.heartbeats.append(envelope.heartbeat)
            if body in wanted:
                return envelope
            if body != "heartbeat":
                self.others.append(envelope)
        raise AssertionError(f"no {wanted} within {timeout_s} s; got {[o.WhichOneof('body') for o in self.others]}")

    def start(self, epoch: int, *, first_step_id: int = 1, lease_ms: int = 60_000, depth: int = 2) -> pb.ExecutorHello:
        """Wait for a hello and accept it."""
        hello = self.receive("hello").hello
        self.accept(epoch, first_step_id=first_step_id, lease_ms=lease_ms, depth=depth)
        return hello

    def accept(self, epoch: int, *, first_step_id: int = 1, lease_ms: int = 60_000, depth: int = 2) -> None:
        self.channel.open(epoch)
        self.send(
            session_start=pb.SessionStart(
                chosen_protocol=1, lease_ms=lease_ms, first_step_id=first_step_id, pipeline_depth=depth
            )
        )

    def step(self, plan: pb.StepPlan) -> pb.StepResult:
        self.send(plan=plan)
        return self.receive("result").result


class RunningWorker:
    """A worker over a loopback link in a thread of its own; use as a context manager."""

    def __init__(self, bench: Bench | None = None, *, options: WorkerOptions | None = None) -> None:
        self.bench = bench or Bench()
        self.hub = LoopbackHub()
        self.scheduler = MiniScheduler(self.hub)
        self.metrics = ExecutorMetrics()
        self.exit: Exit | None = None
        self.worker = Worker(
            self.hub.connect(PeerId(b"executor/test/1")),
            pb.ExecutorHello(protocol_min=1, protocol_max=1, incarnation="1"),
            self.bench.executor,
            self.bench.limits,
            metrics=self.metrics,
            options=options or WorkerOptions(lease_s=60.0),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.exit = self.worker.run()

    def __enter__(self) -> RunningWorker:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.worker.stop()
        self.join()
        self.hub.close()

    def join(self) -> Exit | None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.exit

    def stale(self, kind: str) -> float:
        return self.metrics.registry.get_sample_value("pagemill_stale_messages_total", {"kind": kind}) or 0.0


def until(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    """Wait for something that another thread makes true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)
