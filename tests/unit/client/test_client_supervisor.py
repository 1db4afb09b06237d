"""The supervisor over small scripts: start, crash, crash loop, drain in order, and the parent's death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pagemill_client.processes import LAUNCHER, Backoff, ChildSpec, describe_status
from pagemill_client.supervisor import ServeError, Supervisor

SERVE = """
import os, signal, sys
log = open(os.environ["LOG"], "a", buffering=1)
def end(*_):
    print("end", os.environ["ROLE"], file=log)
    sys.exit(int(os.environ.get("STATUS", "0")))
signal.signal(signal.SIGTERM, end)
print("start", os.environ["ROLE"], os.getpid(), file=log)
print("up", flush=True)
while True:
    signal.pause()
"""


class Rig:
    """Makes supervisors over scripts and collects what they say."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.said: list[str] = []
        self.lines: list[tuple[str, str]] = []
        self.up = asyncio.Event()
        self.started: list[Supervisor] = []

    async def start(self, *, lines_shown: bool = False, **scripts: str) -> Supervisor:
        specs = [
            ChildSpec(role, ("-c", script), {"LOG": str(self.log), "ROLE": role}) for role, script in scripts.items()
        ]
        supervisor = Supervisor(
            specs, max_crashes=3, announce=self.said.append, on_line=self._line, lines_shown=lines_shown
        )
        self.started.append(supervisor)
        await supervisor.start()
        return supervisor

    def _line(self, role: str, line: str) -> None:
        self.lines.append((role, line))
        self.up.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                self.up.clear()
                await asyncio.wait([asyncio.create_task(self.up.wait())], timeout=0.05)

    def count(self, word: str) -> int:
        return sum(word in line for _, line in self.lines)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path / "log")
    yield rig
    for supervisor in rig.started:
        await supervisor.kill()


async def test_processes_end_in_order_and_cleanly(rig: Rig) -> None:
    supervisor = await rig.start(a=SERVE, b=SERVE, c=SERVE)
    await rig.until(lambda: rig.count("up") == 3)
    assert await supervisor.drain(10, asyncio.Event())
    words = [line.split()[:2] for line in rig.log.read_text().splitlines()]
    assert words[3:] == [["end", "a"], ["end", "b"], ["end", "c"]]


async def test_an_end_before_readiness_names_the_culprit(rig: Rig) -> None:
    async def never() -> str | None:
        return "nothing"

    supervisor = await rig.start(good=SERVE, bad="import sys; print('no memory', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ServeError, match=r"bad ended before it was ready \(exit status 3\)\n.*\n  no memory"):
        await supervisor.wait_ready(never, 10)


async def test_lines_that_were_shown_are_not_repeated(rig: Rig) -> None:
    async def never() -> str | None:
        return "nothing"

    supervisor = await rig.start(lines_shown=True, bad="print('no memory'); raise SystemExit(3)")
    with pytest.raises(ServeError) as caught:
        await supervisor.wait_ready(never, 10)
    assert str(caught.value) == "bad ended before it was ready (exit status 3)"
    assert rig.lines == [("bad", "no memory")]


async def test_readiness_has_a_deadline_and_says_what_is_missing(rig: Rig) -> None:
    async def never() -> str | None:
        return "an executor"

    supervisor = await rig.start(a=SERVE)
    await rig.until(lambda: rig.count("up") == 1)
    with pytest.raises(ServeError, match=r"not ready after 0.2 s, waiting for an executor\n.*\n  up"):
        await supervisor.wait_ready(never, 0.2)


async def test_a_killed_process_is_started_again(rig: Rig) -> None:
    supervisor = await rig.start(a=SERVE, b=SERVE)
    await rig.until(lambda: rig.count("up") == 2)
    stop = asyncio.Event()
    keeping = asyncio.create_task(supervisor.keep(stop))
    pid = supervisor.children[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await rig.until(lambda: rig.count("up") == 3)
    assert rig.said == ["a ended (killed by SIGKILL); starting it again in 0.1 s"]
    assert supervisor.children[0].pid not in (None, pid)
    stop.set()
    await keeping
    assert await supervisor.drain(10, asyncio.Event())


async def test_a_crash_loop_ends_with_the_last_lines(rig: Rig) -> None:
    supervisor = await rig.start(a=SERVE, b="print('boom'); raise SystemExit(7)")
    with pytest.raises(ServeError, match=r"b ended 3 times in a row \(exit status 7\)\n.*\n  boom"):
        await supervisor.keep(asyncio.Event())
    assert len(rig.said) == 2


async def test_a_process_that_refuses_its_options_is_not_started_again(rig: Rig) -> None:
    supervisor = await rig.start(a="print('--port: wrong'); raise SystemExit(2)")
    with pytest.raises(ServeError, match="--port: wrong"):
        await supervisor.keep(asyncio.Event())
    assert rig.said == []


async def test_a_process_that_does_not_end_is_killed(rig: Rig) -> None:
    supervisor = await rig.start(a=SERVE.replace("sys.exit(", "str("))
    await rig.until(lambda: rig.count("up") == 1)
    assert not await supervisor.drain(0.2, asyncio.Event())
    assert rig.said == ["a did not end in time; killing it"]


async def test_a_second_signal_hurries(rig: Rig) -> None:
    supervisor = await rig.start(a=SERVE.replace("sys.exit(", "str("), b=SERVE.replace("sys.exit(", "str("))
    await rig.until(lambda: rig.count("up") == 2)
    hurry = asyncio.Event()
    hurry.set()
    async with asyncio.timeout(5):
        assert not await supervisor.drain(3600, hurry)


async def test_a_failure_while_stopping_is_reported(rig: Rig) -> None:
    supervisor = await rig.start(a=SERVE.replace('"STATUS", "0"', '"STATUS", "4"'))
    await rig.until(lambda: rig.count("up") == 1)
    assert not await supervisor.drain(10, asyncio.Event())
    assert rig.said[0].startswith("a ended while stopping (exit status 4)")


async def test_a_long_line_does_not_stop_the_reading(rig: Rig) -> None:
    await rig.start(a="import sys; sys.stdout.write('x' * 300_000 + '\\nlast\\n'); sys.stdout.flush()\n" + SERVE)
    await rig.until(lambda: rig.count("last") == 1)


def test_children_die_with_the_supervisor(tmp_path: Path) -> None:
    """The supervisor is killed; what it started must end by itself: the test waits for the end of its output."""
    parent = (
        "import os, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-I', '-S', {str(LAUNCHER)!r}, str(os.getpid()), sys.executable, '-c',"
        " 'import time; print(\"up\", flush=True); time.sleep(600)'])\n"
        "import time; time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"up\n"
        supervisor.kill()
        assert supervisor.stdout.read() == b""  # ends only when the grandchild has closed its copy, by dying


def test_waits_double_up_to_a_cap_and_start_again_after_a_long_life() -> None:
    backoff = Backoff(100, first_s=0.1, cap_s=2.0, stable_s=60)
    assert [backoff.after_crash(1) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert backoff.after_crash(61) == 0.1


def test_too_many_crashes_in_a_row_are_the_end() -> None:
    backoff = Backoff(2)
    assert backoff.after_crash(1) is not None
    assert backoff.after_crash(1) is None


def test_statuses_in_words() -> None:
    assert describe_status(3) == "exit status 3"
    assert describe_status(-9) == "killed by SIGKILL"
    assert describe_status(-200) == "killed by signal 200"
