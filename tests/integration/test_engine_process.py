"""The scheduler as a process: what it imports, how it starts, how it stops."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.v1 import frontend_pb2 as fe
from pagemill.zmq_links import ZmqPeer, new_identity
from tests.integration.test_engine import assert_oracle, submit_many
from tests.oracles.gateway import FakeGateway
from tests.unit.links.test_zmq_links import until

# Runs `python -m scheduler_svc` and prints at its end what it has imported by then.
WITH_MODULES = (
    "import atexit, runpy, sys\n"
    "atexit.register(lambda: print('MODULES', *sorted({name.partition('.')[0] for name in sys.modules})))\n"
    "sys.argv[0] = 'scheduler_svc'\n"
    "runpy.run_module('scheduler_svc', run_name='__main__')\n"
)


class Stack:
    """A scheduler process on ipc endpoints in `directory`, and what connects to it."""

    def __init__(self, directory: Path, exits: ExitStack) -> None:
        self.directory = directory
        self._exits = exits

    def start(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
        )
        self._exits.callback(self._end, process)
        return process

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate(timeout=30)

    def scheduler(self, *options: str) -> subprocess.Popen[str]:
        endpoints = (
            f"--gateway-endpoint=ipc://{self.directory}/g.sock",
            f"--executor-endpoint=ipc://{self.directory}/e.sock",
        )
        return self.start("-c", WITH_MODULES, *endpoints, "--metrics-port=0", *options)

    def oracle(self, *options: str) -> subprocess.Popen[str]:
        endpoint = f"ipc://{self.directory}/e.sock"
        return self.start("-m", "tests.oracles", "--kind=kv", f"--scheduler-endpoint={endpoint}", *options)

    def gateway(self) -> FakeGateway:
        link = ZmqPeer(f"ipc://{self.directory}/g.sock", new_identity("gateway", "gw"))
        self._exits.callback(link.close)
        return FakeGateway(link)


@pytest.fixture
def stack(socket_dir: Path) -> Iterator[Stack]:
    with ExitStack() as exits:
        yield Stack(socket_dir, exits)


def pump(gateway: FakeGateway, condition: Callable[[], Any]) -> None:
    def look() -> bool:
        gateway.poll(0.01)
        return bool(condition())

    until(look, 30)


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str, str]:
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_streams_through_processes_without_torch_numpy_or_grpc(stack: Stack) -> None:
    scheduler = stack.scheduler()
    oracle = stack.oracle("--num-blocks=100")
    gateway = stack.gateway()
    submit_many(gateway, 24, random.Random(1))
    pump(gateway, lambda: gateway.num_open == 0)
    for record in gateway.streams.values():
        assert_oracle(record)
    assert gateway.errors == []
    status, out, err = stop(scheduler)
    assert (status, "fault contained" in err, "Traceback" in err) == (0, False, False), err
    modules = set(out.split("MODULES ")[1].split())
    assert {"zmq", "scheduler_svc"} <= modules
    assert modules.isdisjoint({"torch", "numpy", "grpc", "transformers", "executor_svc", "hypothesis"})
    assert oracle.wait(10) == 0, "the oracle saw a violation"


def until_later(gateway: FakeGateway, then: float) -> None:
    pump(gateway, lambda: time.monotonic() > then)


def until_more(gateway: FakeGateway, records: list[Any]) -> None:
    num_ids = sum(len(record.ids) for record in records)
    pump(gateway, lambda: sum(len(record.ids) for record in records) > num_ids)


def test_executor_that_is_stopped_for_a_moment_twice_costs_no_stream(stack: Stack) -> None:
    scheduler, executor = stack.scheduler("--log-level=info"), stack.oracle("--step-s=0.02")
    gateway = stack.gateway()
    records = [gateway.submit([seed, 1], max_tokens=100, seed=seed) for seed in range(8)]
    pump(gateway, lambda: all(record.ids for record in records))
    for _ in range(2):
        executor.send_signal(signal.SIGSTOP)
        until_later(gateway, time.monotonic() + 1.0)
        executor.send_signal(signal.SIGCONT)
        until_more(gateway, records)
    pump(gateway, lambda: gateway.num_open == 0)
    for record in records:
        assert record.ended is not None
        assert record.ended.error == fe.STREAM_ERROR_UNSPECIFIED
        assert_oracle(record)
    _, _, err = stop(scheduler)
    assert "predecessor_died=True" not in err


def test_killed_scheduler_loses_no_stream(stack: Stack) -> None:
    first = stack.scheduler("--lease-ms=600")
    stack.oracle("--step-s=0.003")
    gateway = stack.gateway()
    submit_many(gateway, 16, random.Random(2))
    pump(gateway, lambda: sum(len(record.ids) for record in gateway.streams.values()) > 60)
    first.kill()
    first.wait(10)
    second = stack.scheduler("--lease-ms=600")
    pump(gateway, lambda: gateway.num_open == 0)
    for record in gateway.streams.values():
        assert_oracle(record)
    assert (gateway.errors, gateway.num_sessions) == ([], 2)
    assert stop(second)[0] == 0


def test_killed_executor_process_is_replaced_at_once(stack: Stack) -> None:
    scheduler = stack.scheduler()
    first = stack.oracle("--step-s=0.003")
    gateway = stack.gateway()
    submit_many(gateway, 16, random.Random(3))
    pump(gateway, lambda: sum(len(record.ids) for record in gateway.streams.values()) > 60)
    first.kill()
    stack.oracle("--num-blocks=40")
    pump(gateway, lambda: gateway.num_open == 0)
    for record in gateway.streams.values():
        assert_oracle(record)
        assert record.num_doubled == 0
    assert (gateway.errors, gateway.num_sessions) == ([], 1)
    assert stop(scheduler)[0] == 0


def test_second_sigterm_ends_at_once_and_every_stream_has_its_end(stack: Stack) -> None:
    scheduler = stack.scheduler("--drain-timeout-s=600")
    stack.oracle("--step-s=0.05")
    gateway = stack.gateway()
    records = [gateway.submit([seed], max_tokens=400) for seed in range(5)]
    pump(gateway, lambda: all(record.ids for record in records))
    scheduler.send_signal(signal.SIGTERM)
    pump(gateway, lambda: gateway.status is not None and gateway.status.draining)
    assert scheduler.poll() is None
    scheduler.send_signal(signal.SIGTERM)
    pump(gateway, lambda: gateway.num_open == 0)
    assert {record.ended.error for record in records if record.ended} == {fe.STREAM_ERROR_DRAINING}
    assert scheduler.wait(10) == 1


def test_second_scheduler_on_the_same_endpoints_is_refused_with_one_line(stack: Stack) -> None:
    first = stack.scheduler()
    gateway = stack.gateway()
    pump(gateway, lambda: gateway.num_sessions == 1)
    second = stack.scheduler()
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2
    assert err.startswith("pagemill scheduler: ")
    assert "another process is already listening there" in err
    assert err.count("\n") == 1
    assert first.poll() is None
    assert stop(first, signal.SIGINT)[0] == 0


def test_metrics_port_answers_and_a_taken_one_is_refused(stack: Stack, free_port: Callable[[], int]) -> None:
    port = free_port()
    scheduler = stack.scheduler(f"--metrics-port={port}")
    gateway = stack.gateway()
    pump(gateway, lambda: gateway.num_sessions == 1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert 'pagemill_executors{state="ready"} 0.0' in answer.read().decode()
    assert stop(scheduler)[0] == 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = stack.scheduler(f"--metrics-port={taken.getsockname()[1]}")
        _, err = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "metrics cannot listen" in err.splitlines()[-1]
    assert not os.path.exists(stack.directory / "g.sock")
