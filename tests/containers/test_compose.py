"""The service as `docker compose up` starts it: does it answer, is it locked up, and does it survive a kill.

The tests share one running project; those that break something come last and leave it healthy.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
from testcontainers.compose import DockerCompose
from testcontainers.core.docker_client import DockerClient

from pagemill_client import Client, Message
from pagemill_client.types import Delta, Event, Finished

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("scheduler", "executor", "gateway")
USER = "10001"
BUILD_S, UP_S, STREAM_S = 900.0, 180.0, 90.0

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Project:
    """A running compose project; its name, port and image tag are in this process's environment."""

    name: str
    port: int
    engine: DockerClient

    def compose(self, *services: str, build: bool = False) -> DockerCompose:
        """All services, or the named ones."""
        return DockerCompose(ROOT, "compose.yaml", build=build, services=list(services) or None)

    def start(self, *, build: bool = False) -> None:
        """Returns when every service is healthy; else what they logged is in the error."""
        compose = self.compose(build=build)
        try:
            compose.start()
        except CalledProcessError as error:
            logs, _ = compose.get_logs()
            raise AssertionError(f"{error}\n{error.stderr.decode()[-4000:]}\n{logs[-8000:]}") from None

    def inspect(self, service: str) -> dict[str, Any]:
        """All that the engine knows of the service's container, which need not run."""
        container = self.compose().get_container(service, include_all=True)
        # The library's own view of a container (`get_container_info`) has no security options.
        facts: dict[str, Any] = self.engine.client.containers.get(container.ID).attrs
        return facts

    def python(self, service: str, code: str) -> str:
        stdout, _, _ = self.compose().exec_in_container(["python", "-c", code], service)
        return stdout.strip()

    def client(self) -> Client:
        return Client(f"127.0.0.1:{self.port}", timeout_s=STREAM_S)


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    project = Project(f"pagemill-test-{os.getpid()}", port, DockerClient())
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("COMPOSE_PROJECT_NAME", project.name)
        environment.setenv("PAGEMILL_PORT", str(port))
        environment.setenv("PAGEMILL_TAG", "test")
        try:
            project.start(build=True)
            yield project
        finally:
            project.compose().stop()
            project.engine.client.close()


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
    assert [project.engine.client.networks.get(name).attrs["Internal"] for name in networks] == [True]
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
    with suppress(CalledProcessError):  # the container may end, and this with it, before the status is known
        project.python(service, code)


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
    num_tokens = 120  # a drain ends after 30 s, and a busy machine gives five tokens a second
    events: list[Event] = []
    stopping: Future[None] | None = None
    with project.client() as client, ThreadPoolExecutor(1) as threads:
        for event in client.generate("The river", max_tokens=num_tokens, temperature=0, ignore_eos=True):
            events.append(event)
            if len(events) == 5:
                stopping = threads.submit(project.compose("gateway").stop, down=False)
        assert stopping is not None
        stopping.result(60)
    check_whole(events, num_tokens)
    assert project.inspect("gateway")["State"]["ExitCode"] == 0


def test_starts_again_after_a_stop(project: Project) -> None:
    project.start()
    deadline = time.monotonic() + 30
    with project.client() as client:
        while not client.ready():
            assert time.monotonic() < deadline
        assert client.generate("Two and two make", max_tokens=4, temperature=0).collect().text
