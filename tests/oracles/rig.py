"""An engine with oracles and fake gateways around it: in lock step on a made-up clock, or live in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from pagemill.links import HubLink
from pagemill.loopback import LoopbackHub
from pagemill.zmq_links import EXECUTOR_BOUND, GATEWAY_BOUND, Waiter, ZmqHub, ZmqPeer, new_identity
from scheduler_svc.config import EngineConfig
from scheduler_svc.core.params import SchedulerConfig
from scheduler_svc.engine import Engine, Phase
from tests.oracles.base import Geometry, OracleExecutor
from tests.oracles.chain import ChainExecutor
from tests.oracles.gateway import FakeGateway


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class LockstepRig:
    """Everything in this thread over loopback; `turn` lets each side act once and time pass a little.

    Deterministic: nothing sleeps, and a test can stop the world between any two messages.
    """

    def __init__(
        self,
        *,
        core: SchedulerConfig | None = None,
        config: EngineConfig | None = None,
        bound: int = 64,
        turn_s: float = 0.001,
    ) -> None:
        self.clock = FakeClock()
        self.executor_hub, self.gateway_hub = LoopbackHub(bound), LoopbackHub(bound)
        self.engine = Engine(
            core_config=core or SchedulerConfig(),
            config=config or EngineConfig(),
            executor_hub=self.executor_hub,
            gateway_hub=self.gateway_hub,
            clock=self.clock,
            first_epoch=1000,
            wait=lambda timeout_s: False,
        )
        self.turn_s = turn_s
        self.executors: list[OracleExecutor] = []
        self.gateways: list[FakeGateway] = []

    def add_executor(
        self,
        kind: type[OracleExecutor] = ChainExecutor,
        geometry: Geometry | None = None,
        name: str = "oracle",
        **kwargs: Any,
    ) -> Any:
        link = self.executor_hub.connect(new_identity("executor", name))
        executor = kind(link, geometry, clock=self.clock, **kwargs)
        self.executors.append(executor)
        return executor

    def add_gateway(self, name: str = "gw", **kwargs: Any) -> Any:
        """A `FakeGateway`; Any, so that tests may look into answers that might not have come."""
        link = self.gateway_hub.connect(new_identity("gateway", name))
        gateway = FakeGateway(link, clock=self.clock, **kwargs)
        self.gateways.append(gateway)
        return gateway

    def kill_executor(self, executor: OracleExecutor) -> None:
        self.executors.remove(executor)
        executor.link.close()

    def kill_gateway(self, gateway: FakeGateway) -> None:
        self.gateways.remove(gateway)
        gateway.link.close()

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            for gateway in self.gateways:
                gateway.poll()
            if self.engine.phase is not Phase.DONE:
                self.engine.step()
            for executor in self.executors:
                executor.poll()
            self.clock.now += self.turn_s

    def pass_time(self, seconds: float, step_s: float = 0.1) -> None:
        """Let much time pass in few turns."""
        turn_s, self.turn_s = self.turn_s, step_s
        self.turn(max(1, round(seconds / step_s)))
        self.turn_s = turn_s

    def until(self, condition: Callable[[], bool], what: str = "the condition", limit: int = 20_000) -> None:
        for _ in range(limit):
            if condition():
                return
            self.turn()
        raise AssertionError(f"{what} did not come true in {limit} turns")

    def finish(self) -> None:
        self.until(lambda: all(gateway.num_open == 0 for gateway in self.gateways), "the end of all streams")

    def assert_clean(self) -> None:
        """Nothing is left anywhere, and nobody saw anything wrong."""
        self.until(lambda: self.engine.core.num_inflight_plans == 0, "the last results")
        self.turn(20)
        stats = self.engine.core.stats()
        assert self.engine.core.check_invariants() == []
        assert (stats.running, stats.queue_requests, stats.preempted) == (0, 0, 0)
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert self.engine.gateways.num_streams == 0
        assert not any(session.stream_of or session.silent for session in self.engine.gateways.sessions.values())
        for executor in self.executors:
            assert executor.violations == []
            assert executor.lanes == {}
            assert not executor.copies.pending
        for gateway in self.gateways:
            assert gateway.errors == []
        assert self.engine.counters.faults == 0
        assert self.engine.counters.invariant_violations == 0


class LiveRig:
    """The engine in a thread on real sockets in `directory`, or on loopback when that is None."""

    def __init__(
        self, directory: Any = None, *, core: SchedulerConfig | None = None, config: EngineConfig | None = None
    ) -> None:
        self._directory = directory
        self.executor_hub = self._hub("executor", EXECUTOR_BOUND)
        self.gateway_hub = self._hub("gateway", GATEWAY_BOUND)
        self.engine = Engine(
            core_config=core or SchedulerConfig(),
            config=config or EngineConfig(),
            executor_hub=self.executor_hub,
            gateway_hub=self.gateway_hub,
            first_epoch=time.time_ns() // 1_000_000,
            wait=Waiter([self.executor_hub, self.gateway_hub]).wait,
        )
        self.status: int | None = None
        self._links: list[Any] = []
        self._stops: list[tuple[threading.Thread, threading.Event]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _hub(self, role: str, bound: int) -> Any:
        if self._directory is None:
            return LoopbackHub(bound)
        return ZmqHub(f"ipc://{self._directory}/{role}s.sock", role=role, bound=bound)

    def _run(self) -> None:
        self.status = self.engine.run()

    def _peer(self, hub: HubLink, role: str, name: str) -> Any:
        if isinstance(hub, LoopbackHub):
            return hub.connect(new_identity(role, name))
        return ZmqPeer(f"ipc://{self._directory}/{role}s.sock", new_identity(role, name))

    def add_executor(self, kind: type[OracleExecutor], geometry: Geometry | None = None, **kwargs: Any) -> Any:
        executor = kind(self._peer(self.executor_hub, "executor", "oracle"), geometry, **kwargs)
        self._links.append(executor.link)
        self._stops.append(executor.start_thread())
        executor.thread = self._stops[-1]  # type: ignore[attr-defined]
        return executor

    def kill_executor(self, executor: Any) -> None:
        thread, stop = executor.thread
        stop.set()
        thread.join(10)
        executor.link.close()
        self._links.remove(executor.link)

    def add_gateway(self, **kwargs: Any) -> FakeGateway:
        link = self._peer(self.gateway_hub, "gateway", "gw")
        self._links.append(link)
        return FakeGateway(link, **kwargs)

    def until(self, condition: Callable[[], bool], *gateways: FakeGateway, limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            for gateway in gateways:
                gateway.poll(0.005)
            if not gateways:
                time.sleep(0.002)
            assert time.monotonic() < deadline, "the condition did not come true in time"

    def close(self) -> None:
        self.engine.request_stop()
        self.engine.request_stop()
        self._thread.join(10)
        assert not self._thread.is_alive()
        for thread, stop in self._stops:
            stop.set()
            thread.join(10)
        for link in self._links:
            link.close()
        self.executor_hub.close()
        self.gateway_hub.close()
