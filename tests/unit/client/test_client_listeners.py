"""A stack whose ports are taken is refused before anything starts, whoever holds them and however healthy it is."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from pagemill_client import serve
from pagemill_client.listeners import Listener, check_free
from pagemill_client.roles import OptionError
from tests.unit.client.fake_gateway import FakeGateway

NO_METRICS = ["--admin-port=0", "--gateway.metrics-port=0", "--scheduler.metrics-port=0", "--executor.metrics-port=0"]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[serve.Stack]:
    """The stacks that were started, which is none in these tests."""
    for name in [name for name in os.environ if name.startswith("PAGEMILL_")]:
        monkeypatch.delenv(name)
    stacks: list[serve.Stack] = []

    async def start(stack: serve.Stack) -> int:
        stacks.append(stack)
        return 0

    monkeypatch.setattr(serve, "serve", start)
    return stacks


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "m.gguf").touch()
    return str(tmp_path / "m.gguf")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_healthy_stranger_on_the_port_is_not_ours(
    gateway: FakeGateway, model: str, started: list[serve.Stack], capsys: pytest.CaptureFixture[str]
) -> None:
    port = gateway.target.rpartition(":")[2]
    argv = ["--model", model, "--port", port, *NO_METRICS]
    assert await asyncio.to_thread(serve.main, argv) == 2
    assert capsys.readouterr().err == (
        f"pagemill serve: --port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )
    assert started == []


def test_a_taken_metrics_port_names_the_role(
    model: str, started: list[serve.Stack], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = ["--model", model, "--port=0", *NO_METRICS[:3], f"--executor.metrics-port={port}"]
        assert serve.main(argv) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"pagemill serve: --executor.metrics-port: cannot listen on 127.0.0.1:{port}: ")
    assert line.count("\n") == 1
    assert started == []


@pytest.mark.parametrize("source", ["environment", "file"])
def test_one_metrics_port_for_all_roles_names_the_clash(
    source: str,
    model: str,
    tmp_path: Path,
    started: list[serve.Stack],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    port = free_port()
    argv = ["--model", model, "--port=0", "--admin-port=0"]
    if source == "environment":
        monkeypatch.setenv("PAGEMILL_METRICS_PORT", str(port))
    else:
        (tmp_path / "c.toml").write_text(f"metrics_port = {port}\n")
        argv += ["--config", str(tmp_path / "c.toml")]
    assert serve.main(argv) == 2
    line = capsys.readouterr().err
    assert line.startswith(
        f"pagemill serve: --scheduler.metrics-port: 127.0.0.1:{port} is also --gateway.metrics-port's 127.0.0.1:{port}"
    )
    assert line.count("\n") == 1
    assert started == []


def test_free_ports_are_free_afterwards_too(model: str, started: list[serve.Stack]) -> None:
    argv = ["--model", model, "--port", str(free_port()), *NO_METRICS]
    assert serve.main(argv) == 0
    assert len(started) == 1
    check_free(started[0].ports)


def test_a_port_of_the_systems_choice_is_none_that_is_promised(
    model: str, started: list[serve.Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free as it is: the role that it is promised to has not started yet."""
    admin = free_port()
    chosen: list[int] = []

    class Choosing(socket.socket):
        def bind(self, address: Any) -> None:
            if address[1] == 0 and not chosen:
                address = (address[0], admin)
            super().bind(address)
            chosen.append(self.getsockname()[1])

    monkeypatch.setattr("pagemill_client.serve.socket.socket", Choosing)
    assert serve.main(["--model", model, "--port", "0", *NO_METRICS[1:], f"--admin-port={admin}"]) == 0
    assert chosen[0] == admin
    (stack,) = started
    assert [listener.option for listener in stack.ports] == ["--port", "--admin-port"]
    assert stack.ports[0].port not in (0, admin)


def test_a_host_that_is_not_here_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--port: cannot listen on 192\.0\.2\.1:80\d\d: "):
        check_free([Listener("--port", "192.0.2.1", 8080)])
    with pytest.raises(OptionError, match=r"--port: cannot listen on no host:8080: "):
        check_free([Listener("--port", "no host", 8080)])
