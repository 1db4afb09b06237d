"""The service as `docker compose up` starts it: does it answer, is it locked up, and does it survive a kill.

The tests share one running project; those that break something come last and leave it healthy.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagemill_client import Client, Message
from pagemill_client.types import Delta, Event, Finished

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("scheduler", "executor", "gateway")
USER = "10001"
BUILD_S, UP_S, STREAM_S = 900.0, 180.0, 90.0

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Project:
    """A running compose project."""

    name: str
    port: int

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PAGEMILL_PORT": str(self.port), "PAGEMILL_TAG": "test"}

    def compose(self, *args: str, timeout: float = 60.0, check: bool = True) -> str:
        done = subprocess.run(
            ["docker", "compose", "-p", self.name, "-f", str(ROOT / "compose.yaml"), *args],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"compose {' '.join(args)}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def inspect(self, service: str) -> dict[str, Any]:
        container = self.compose("ps", "-aq", service).strip()
        return docker_json("inspect", container)

    def python(self, service: str, code: str) -> str:
        return self.compose("exec", "-T", service, "python", "-c", code).strip()

    def client(self) -> Client:
        return Client(f"127.0.0.1:{self.port}", timeout_s=STREAM_S)


def docker_json(*args: str) -> dict[str, Any]:
    out = subprocess.run(["docker", *args], capture_output=True, text=True, timeout=60, check=True).stdout
    found: dict[str, Any] = json.loads(out)[0]
    return found


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    project = Project(f"pagemill-test-{os.getpid()}", port)
    try:
        project.compose("build", "--quiet", timeout=BUILD_S)
        try:
            project.compose("up", "--wait", "--wait-timeout", str(int(UP_S)), timeout=UP_S + 30)
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{project.compose('logs', '--no-color', '--tail', '40', check=False)}"
            ) from None
        yield project
    finally:
        project.compose("down", "-v", "--timeout", "5", timeout=120, check=False)


@pytest.mark.timeout(BUILD_S + UP_S)
def test_streams_an_answer(project: Project) -> None:
    with project.client() as client:
        assert client.ready()
        stream = client.chat([Message("user", "What is the capital of France?")], max_tokens=24, temperature=0)
        pieces = list(stream.texts())
        whole = stream.collect()
    assert "".join(pieces) == whole.text
    # Not which words: in bfloat16 a near-tie may fall either way on another CPU. Numerics have tests of their own.
    assert any(character.isalpha() for character in whole.text)
    assert whole.finished is not None
    assert whole.finished.usage.completion_tokens == len(whole.token_ids) > 0


@pytest.mark.parametrize("service", SERVICES)
def test_runs_locked_up(project: Project, service: str) -> None:
    facts = project.inspect(service)
    host = facts["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["Memory"] > 0
    assert 0 < host["PidsLimit"] <= 256
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert not host["Privileged"]
    status = project.python(service, "print(open('/proc/1/status').read())")
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert set(lines["Uid"].split()) == {USER}
    assert int(lines["CapEff"], 16) == 0
    assert int(lines["NoNewPrivs"]) == 1


@pytest.mark.parametrize("service", SERVICES)
def test_cannot_write_to_its_own_files(project: Project, service: str) -> None:
    code = (
        "import pathlib, pagemill\n"
        "for folder in ('/', '/opt', pathlib.Path(pagemill.__file__).parent):\n"
        "    try: (pathlib.Path(folder) / 'x').write_text('x')\n"
        "    except OSError: continue\n"
        "    print('wrote to', folder)\n"
    )
    assert project.python(service, code) == ""


def test_sockets_are_for_their_user_only(project: Project) -> None:
    code = "import os; s = os.stat('/run/pagemill'); print(oct(s.st_mode & 0o777), s.st_uid)"
    assert project.python("gateway", code) == f"0o700 {USER}"


def test_publishes_the_gateways_port_on_loopback_and_nothing_else(project: Project) -> None:
    published = {
        (service, inside, binding["HostIp"], binding["HostPort"])
        for service in SERVICES
        for inside, bindings in project.inspect(service)["NetworkSettings"]["Ports"].items()
        for binding in bindings or []
    }
    assert published == {("gateway", "50051/tcp", "127.0.0.1", str(project.port))}


@pytest.mark.parametrize("service", ["scheduler", "executor"])
def test_has_no_way_out_of_the_private_network(project: Project, service: str) -> None:
    networks = project.inspect(service)["NetworkSettings"]["Networks"]
    assert [docker_json("network", "inspect", name)["Internal"] for name in networks] == [True]
    # The gateway listens on both of its networks; only its address on the private one can be reached.
    addresses = project.inspect("gateway")["NetworkSettings"]["Networks"]
    code = (
        "import socket\n"
        "try: socket.create_connection(({address!r}, 50051), 2).close(); print('reached')\n"
        "except OSError: print('not reached')\n"
    )
    reached = {
        name.removeprefix(f"{project.name}_"): project.python(service, code.format(address=found["IPAddress"]))
        for name, found in addresses.items()
    }
    assert reached == {"backplane": "reached", "edge": "not reached"}


@pytest.mark.parametrize(
    ("service", "absent"),
    [
        ("scheduler", ["torch", "numpy", "grpc", "transformers", "tokenizers", "executor_svc", "pip"]),
        ("gateway", ["torch", "transformers", "executor_svc", "pip"]),
        ("executor", ["grpc", "pip"]),
    ],
)
def test_image_leaves_out_what_its_process_must_not_have(project: Project, service: str, absent: list[str]) -> None:
    code = f"from importlib.util import find_spec; print([m for m in {absent!r} if find_spec(m)])"
    assert project.python(service, code) == "[]"


def kill_process(project: Project, service: str) -> None:
    """SIGKILL to the service's process, as a crash would end it. (After `docker kill` the engine restarts nothing.)"""
    code = (
        "import os, signal\n"
        "me = os.getpid()\n"
        "for pid in (int(p) for p in os.listdir('/proc') if p.isdigit()):\n"
        "    command = open(f'/proc/{pid}/cmdline').read()\n"
        "    if pid != me and '_svc' in command and 'init' not in command: os.kill(pid, signal.SIGKILL)\n"
    )
    project.compose("exec", "-T", service, "python", "-c", code, check=False)


def check_whole(events: list[Event], num_tokens: int) -> None:
    """No token lost, none twice, one end."""
    indexes = [
        event.first_index + i for event in events if isinstance(event, Delta) for i in range(len(event.token_ids))
    ]
    assert indexes == list(range(num_tokens))
    [end] = [event for event in events if isinstance(event, Finished)]
    assert end is events[-1]
    assert end.usage.completion_tokens == num_tokens


@pytest.mark.parametrize("service", ["executor", "scheduler"])
def test_stream_survives_the_kill_of(project: Project, service: str) -> None:
    restarts = project.inspect(service)["RestartCount"]
    num_tokens = 300
    events: list[Event] = []
    with project.client() as client:
        stream = client.generate("Once upon a time", max_tokens=num_tokens, temperature=0, ignore_eos=True)
        for event in stream:
            events.append(event)
            if len(events) == 20:
                kill_process(project, service)
    check_whole(events, num_tokens)
    assert project.inspect(service)["RestartCount"] == restarts + 1


def test_stopping_the_gateway_lets_streams_finish(project: Project) -> None:
    num_tokens = 200
    events: list[Event] = []
    stopping: subprocess.Popen[bytes] | None = None
    with project.client() as client:
        for event in client.generate("The river", max_tokens=num_tokens, temperature=0, ignore_eos=True):
            events.append(event)
            if len(events) == 5:
                command = ["docker", "compose", "-p", project.name, "-f", str(ROOT / "compose.yaml"), "stop", "gateway"]
                stopping = subprocess.Popen(command, env=project.environment, stderr=subprocess.DEVNULL)
    assert stopping is not None
    assert stopping.wait(60) == 0
    check_whole(events, num_tokens)
    assert project.inspect("gateway")["State"]["ExitCode"] == 0


def test_starts_again_after_a_stop(project: Project) -> None:
    project.compose("up", "--wait", "--wait-timeout", "90", timeout=120)
    deadline = time.monotonic() + 30
    with project.client() as client:
        while not client.ready():
            assert time.monotonic() < deadline
        assert client.generate("Two and two make", max_tokens=4, temperature=0).collect().text
