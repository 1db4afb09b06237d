"""The real process: starts with the demo model, serves over a real socket, drains on SIGTERM, refuses bad options."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.links import PeerId, SendOutcome
from pagemill.model_files import find_demo_model
from pagemill.v1 import inference_pb2 as pb
from pagemill.v1 import inference_pb2_grpc
from pagemill.zmq_links import GATEWAY_BOUND, ZmqHub
from tests.integration.gateway_fixture import FakeScheduler, FakeStream, collect, rest_of, until

READY_S = 60.0


class _PollableHub:
    """A `ZmqHub` for the fake scheduler, whose loop also looks by the clock and so need not trust the descriptor."""

    def __init__(self, hub: ZmqHub) -> None:
        self._hub = hub
        self.fileno, self.recv = hub.fileno, hub.recv

    def send(self, peer: PeerId, frame: bytes) -> SendOutcome:
        return self._hub.send(peer, frame)


def command(*options: str, port: int = 0) -> list[str]:
    return [
        sys.executable,
        "-m",
        "scheduler_svc.gateway",
        "--port",
        str(port),
        "--metrics-port",
        "0",
        "--admin-port",
        "0",
        *options,
    ]


@dataclass
class Running:
    """A gateway process, its fake scheduler, and where it can be reached."""

    process: subprocess.Popen[bytes]
    scheduler: FakeScheduler
    log: Path

    @property
    def address(self) -> str:
        found = re.search(r"serving host=(\S+) port=(\d+)", self.log.read_text())
        assert found
        return f"{found[1]}:{found[2]}"

    async def exit_status(self) -> int:
        await until(lambda: self.process.poll() is not None, 10)
        return int(self.process.returncode)


@asynccontextmanager
async def serving(folder: Path, *options: str) -> AsyncIterator[Running]:
    """A gateway process with the demo model, and a fake scheduler on a real socket."""
    endpoint = f"ipc://{folder}/g.sock"
    hub = ZmqHub(endpoint, role="gateway", bound=GATEWAY_BOUND)
    scheduler = FakeScheduler(_PollableHub(hub))  # type: ignore[arg-type]
    scheduler.status.max_model_len = 8192
    running = asyncio.create_task(scheduler.run())
    model = str(find_demo_model())
    log = folder / "gateway.log"
    argv = command("--model", model, "--scheduler-endpoint", endpoint, *options)
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stderr=out)
    try:
        await until(lambda: scheduler.hellos > 0 and b"serving host=" in log.read_bytes(), READY_S)
        yield Running(process, scheduler, log)
    finally:
        process.kill()
        process.wait(10)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        hub.close()


def chat_request(max_tokens: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")]))
    request.stopping.max_tokens = max_tokens
    return request


async def slowly(stream: FakeStream) -> None:
    stream.accept()
    for _ in range(stream.submit.max_tokens):
        stream.tokens([28120])
        await asyncio.sleep(0.02)
    stream.end()


@pytest.mark.model
async def test_it_serves_and_b91_drains_on_sigterm(socket_dir: Path) -> None:
    async with serving(socket_dir) as gateway:
        gateway.scheduler.script = slowly
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            api = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            calls = [asyncio.create_task(collect(api.Generate(chat_request(40), timeout=30))) for _ in range(50)]
            await until(lambda: len(gateway.scheduler.live) == 50)
            gateway.process.send_signal(signal.SIGTERM)
            answers = await asyncio.gather(*calls)
            assert {len(a.token_ids) for a in answers} == {40}
            assert {a.text for a in answers} == {"hello" * 40}
        assert await gateway.exit_status() == 0


@pytest.mark.model
async def test_b91_a_second_sigterm_exits_at_once(socket_dir: Path) -> None:
    async with serving(socket_dir, "--drain-timeout-s", "60") as gateway:
        gateway.scheduler.script = slowly
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            api = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            call = api.Generate(chat_request(4000), timeout=60)
            await call.read()
            gateway.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            assert gateway.process.poll() is None
            start = time.monotonic()
            gateway.process.send_signal(signal.SIGTERM)
            assert await gateway.exit_status() == 128 + signal.SIGTERM
            assert time.monotonic() - start < 5
            with pytest.raises(grpc.aio.AioRpcError):
                await rest_of(call)


@pytest.mark.model
async def test_a_rejected_gateway_leaves_with_the_schedulers_line(socket_dir: Path) -> None:
    async with serving(socket_dir) as gateway:
        gateway.scheduler.post(reject=wire.FrontendReject(reason="another model"))
        assert await gateway.exit_status() == 1
        assert "refused this gateway: another model" in gateway.log.read_text()


@pytest.mark.model
async def test_metrics_are_served_on_their_port(socket_dir: Path, free_port: Any) -> None:
    port = free_port()
    async with serving(socket_dir, "--metrics-port", str(port)):
        url = f"http://127.0.0.1:{port}/metrics"

        def fetch() -> str:
            with urllib.request.urlopen(url, timeout=20) as response:
                return str(response.read().decode())

        text = await asyncio.to_thread(fetch)
        for name in ("requests", "prompt_tokens", "generated_tokens", "time_to_first_token_seconds", "e2e_seconds"):
            assert f"pagemill_{name}" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "/nowhere"], "no model at /nowhere"),
        (["--model", "MODEL", "--host", "0.0.0.0"], "needs --insecure"),
        (["--model", "MODEL", "--metrics-host", "0.0.0.0"], "needs --insecure"),
        (["--model", "MODEL", "--admin-host", "0.0.0.0"], "--admin-host '0.0.0.0' is not a loopback address"),
        (["--model", "MODEL", "--scheduler-endpoint", "tcp://127.0.0.1:5560"], "--insecure"),
        (["--model", "MODEL", "--port", "70000"], "--port"),
        (["--model", "MODEL", "--no-such-option", "1"], "no-such-option"),
        ([], "--model"),
    ],
)
@pytest.mark.model
def test_bad_options_end_with_one_clear_line(options: list[str], says: str) -> None:
    filled = [str(find_demo_model()) if o == "MODEL" else o for o in options]
    argv = [sys.executable, "-m", "scheduler_svc.gateway", *filled]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "what"), [("port", "gRPC"), ("metrics-port", "metrics"), ("admin-port", "the admin service")]
)
@pytest.mark.model
def test_a_taken_port_ends_with_one_clear_line(socket_dir: Path, option: str, what: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ("--model", str(find_demo_model()), "--scheduler-endpoint", f"ipc://{socket_dir}/g.sock")
        argv = command(*options, f"--{option}", str(port))
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    host = option.replace("port", "host")
    assert line == (
        f"pagemill gateway: {what} cannot listen on 127.0.0.1:{port} (--{host}, --{option}): Address already in use"
    )
