"""What every test may rely on: the demo model, a Docker engine, free ports, short socket folders, and an end.

Nothing here may hang CI: each test has a time limit (`TIME_LIMIT_S`, or `@pytest.mark.timeout(seconds)`), and the run
fails if it leaves a child process or a non-daemon thread behind.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import pytest

from executor_svc.__main__ import calm_openmp
from pagemill.model_files import ModelFileError, find_demo_model
from tests.property import campaign

# Tests compute in this process too, beside processes that others have started.
calm_openmp()

ROOT = Path(__file__).resolve().parent.parent

TIME_LIMIT_S = 120.0
"""Longest time for one test including its fixtures' set-up; a few tests ask for more with the marker."""

STDERR = os.dup(2)
"""The run's own stderr, which pytest does not capture."""

GRACE_S = 30.0
"""What a test gets beyond its limit to unwind, before the whole run is ended with every thread's stack."""

AGAIN_S = 20.0
"""Time between the first alarm and the next: whatever called the code that ran then may have swallowed the first."""


class OutOfTimeError(BaseException):
    """A test ran longer than it may.

    Neither an Exception nor pytest's own failure, because Hypothesis takes both for one more failing example, and goes
    on to make that smaller.
    """


def pytest_configure(config: pytest.Config) -> None:
    campaign.configure()
    config.addinivalue_line("markers", "timeout(seconds): time limit of this test instead of the default")


# A time limit of our own instead of a plugin: 30 lines, no dependency, and both stages are needed. The alarm raises
# in the test, so that its `finally` blocks end the processes it started. Where the main thread is stuck in C code
# and no Python handler runs, faulthandler's watchdog thread prints all stacks and ends the run.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0]) if marker else TIME_LIMIT_S

    def out_of_time(signum: int, frame: FrameType | None) -> None:
        raise OutOfTimeError(f"{item.nodeid} ran longer than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session", autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails the run if child processes or non-daemon threads outlive all other fixtures."""
    yield
    deadline = time.monotonic() + 5.0
    while (left := _children() + _threads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left behind by some test: {left}"


def _children() -> list[str]:
    """Command lines of this process's children, without zombies and multiprocessing's own helpers."""
    found = []
    for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except FileNotFoundError:
            continue
        if (
            command
            and "multiprocessing.resource_tracker" not in command
            and "multiprocessing.forkserver" not in command
        ):
            found.append(f"process {pid}: {command[:120]}")
    return found


def _threads() -> list[str]:
    main = threading.main_thread()
    return [f"thread {t.name}" for t in threading.enumerate() if t is not main and not t.daemon and t.is_alive()]


def model_problem() -> str | None:
    """Why there is no demo model here; None if there is one."""
    try:
        find_demo_model()
    except ModelFileError as error:
        return str(error)
    return None


@cache
def docker_problem() -> str | None:
    """Why no Docker engine with Compose v2 can be used here; None if one can."""
    if shutil.which("docker") is None:
        return "no docker command on PATH"
    for command, what in (
        (["docker", "info"], "no Docker engine answers"),
        (["docker", "compose", "version"], "no Compose v2"),
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except subprocess.TimeoutExpired:
            return f"{what} (`{' '.join(command)}` took 20 s)"
        if done.returncode:
            return f"{what}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what cannot run here, with the reason."""
    if item.get_closest_marker("model") and (problem := model_problem()):
        pytest.skip(f"needs the demo model: {problem}")
    if item.get_closest_marker("docker") and (problem := docker_problem()):
        pytest.skip(f"needs Docker: {problem}")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Path of the demo model's GGUF file; tests that use it carry `@pytest.mark.model`."""
    return find_demo_model()


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives TCP ports on loopback that nothing listened on a moment ago. Prefer binding port 0 where the code can."""

    def pick() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    return pick


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private folder with a short path: a Unix socket's path may have 107 bytes, and tmp_path is often longer."""
    folder = Path(tempfile.mkdtemp(prefix="pm-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
